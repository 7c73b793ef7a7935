//! Numbers for people: three digits and a unit, as `highwire bench` prints them.

/// A number of bytes.
pub(crate) fn bytes(bytes: u64) -> String {
    if bytes < 1000 { format!("{bytes} B") } else { scaled(bytes as f64, &["B", "kB", "MB", "GB", "TB"]) }
}

/// A number of things.
pub(crate) fn count(count: u64) -> String {
    if count < 1000 { count.to_string() } else { scaled(count as f64, &["", "k", "M", "G", "T"]) }
}

/// Bytes in a second.
pub(crate) fn bytes_rate(rate: f64) -> String {
    scaled(rate, &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])
}

/// Things in a second; the second is in the head of the column.
pub(crate) fn rate(rate: f64) -> String {
    scaled(rate, &["", "k", "M", "G", "T"])
}

/// A part in per cent. All and nothing are said only where it is all or nothing.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    match part {
        _ if whole == 0 => "–".to_owned(),
        0 => "0 %".to_owned(),
        part if part >= whole => "100 %".to_owned(),
        part => format!("{:.1} %", (part as f64 * 100.0 / whole as f64).clamp(0.1, 99.9)),
    }
}

fn scaled(mut value: f64, units: &[&str]) -> String {
    if value == 0.0 {
        return format!("0 {}", units[0]).trim_end().to_owned();
    }
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = match value {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {}", units[unit]).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits_and_a_fitting_unit() {
        assert_eq!([0, 1, 999].map(bytes), ["0 B", "1 B", "999 B"]);
        assert_eq!([1000, 12_345, 999_499, 999_500].map(bytes), ["1.00 kB", "12.3 kB", "999 kB", "1.00 MB"]);
        assert_eq!([7 << 40, u64::MAX].map(bytes), ["7.70 TB", "18446744 TB"]);
        assert_eq!([0, 999, 1000, 2_000_000].map(count), ["0", "999", "1.00 k", "2.00 M"]);
        assert_eq!([0.0, 0.5, 1.25e9].map(bytes_rate), ["0 B/s", "0.50 B/s", "1.25 GB/s"]);
        assert_eq!([0.0, 12.0, 1.25e6].map(rate), ["0", "12.0", "1.25 M"]);
    }

    #[test]
    fn nearly_all_is_not_all() {
        assert_eq!(percent(0, 0), "–");
        assert_eq!(
            [0, 1, 500_000, 999_999, 1_000_000].map(|part| percent(part, 1_000_000)),
            ["0 %", "0.1 %", "50.0 %", "99.9 %", "100 %"]
        );
    }
}
