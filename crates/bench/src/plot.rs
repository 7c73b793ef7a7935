//! Plots of a report, as SVG.

use crate::BenchError;
use crate::apps;
use crate::landing::{self, heights};
use crate::report::{Report, figure, title};
use crate::sockets;
use crate::stats::Measure;
use crate::trace::{Stripe, Trace};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::Path;

type Sheet<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// Contestants and sizes.
type Content<'a> = (Vec<&'a str>, Vec<u64>);
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// All plots of a report: file names and contents.
pub(crate) fn all(report: &Report, directory: &Path) -> Result<Vec<(String, String)>, BenchError> {
    let mut plots = Vec::new();
    for measure in report.measures_by_size() {
        let name = format!("{}-{}.svg", report.bench, measure.name());
        let svg = draw(directory, &name, (960, 600), |sheet| figures(report, measure, sheet))?;
        plots.push((name, svg));
        if let Some(floor) = report.floor_label(measure) {
            let name = format!("{}-{}-of-floor.svg", report.bench, measure.name());
            let svg = draw(directory, &name, (960, 600), |sheet| ratios(report, measure, floor, sheet))?;
            plots.push((name, svg));
        }
    }
    if report.bench == "landing" {
        for figure in landing::FIGURES {
            let name = format!("{}-{}.svg", report.bench, figure.file);
            let caption = format!("{}, {}", figure.title, report.state);
            let label = |value| crate::report::figure(Measure::BandwidthGbS, value);
            let bars = heights(report, figure);
            let svg = draw(directory, &name, (720, 480), |sheet| draw_bars(&bars, &caption, label, sheet))?;
            plots.push((name, svg));
        }
    }
    if report.bench == "apps" {
        let name = format!("{}-ratio.svg", report.bench);
        let bars = apps::heights(report);
        let caption = format!("Under `highwire run`, as a multiple of plain, {} (more is better)", report.state);
        let extent = (960, 120 + 40 * bars.len() as u32);
        let svg = draw(directory, &name, extent, |sheet| draw_bars(&bars, &caption, crate::report::short, sheet))?;
        plots.push((name, svg));
    }
    if report.bench == "sockets" {
        for figure in sockets::FIGURES {
            let name = format!("{}-{}.svg", report.bench, figure.file);
            let svg = draw(directory, &name, (960, 600), |sheet| some_lines(report, figure, sheet))?;
            plots.push((name, svg));
        }
    }
    if let Some(trace) = &report.trace {
        let name = format!("{}-trace.svg", report.bench);
        let svg = draw(directory, &name, (1100, 420), |sheet| stripes(trace, sheet))?;
        plots.push((name, svg));
    }
    Ok(plots)
}

fn draw(
    directory: &Path,
    name: &str,
    extent: (u32, u32),
    content: impl FnOnce(&Sheet<'_>) -> Drawn,
) -> Result<String, BenchError> {
    let mut svg = String::new();
    let sheet = SVGBackend::with_string(&mut svg, extent).into_drawing_area();
    let drawn = sheet.fill(&WHITE).map_err(Into::into).and_then(|()| content(&sheet));
    let drawn = drawn.and_then(|()| Ok(sheet.present()?));
    drop(sheet);
    drawn.map_err(|why| BenchError::Plot { path: directory.join(name), why: why.to_string() })?;
    Ok(svg)
}

/// Medians over sizes, with a bar from p10 to p90.
fn figures(report: &Report, measure: Measure, sheet: &Sheet<'_>) -> Drawn {
    let by = if measure == Measure::CallsPerS { "by calls under way" } else { "by size" };
    let caption = format!("{} {by}, {} ({})", title(measure), report.state, report.machine.cpu);
    let content = (report.contestants(measure), report.sizes(measure));
    medians(report, measure, content, sheet, &caption)
}

/// The same of those in a figure of a paper.
fn some_lines(report: &Report, of: &sockets::Figure, sheet: &Sheet<'_>) -> Drawn {
    let caption = format!("{}, {}", of.title, report.state);
    medians(report, of.measure, of.content(report), sheet, &caption)
}

fn medians(report: &Report, measure: Measure, content: Content<'_>, sheet: &Sheet<'_>, caption: &str) -> Drawn {
    let values = |row: &crate::Row| Some((row.p10, row.median, row.p90));
    lines(report, measure, content, sheet, caption, |value| figure(measure, value), values)
}

/// The ratio to the floor over sizes.
fn ratios(report: &Report, measure: Measure, floor: &str, sheet: &Sheet<'_>) -> Drawn {
    let better = if measure.less_is_better() { "less" } else { "more" };
    let caption = format!("{} as a multiple of {floor}, {} ({better} is better)", title(measure), report.state);
    let content = (report.contestants(measure), report.sizes(measure));
    let values = |row: &crate::Row| row.of_floor.map(|ratio| (ratio, ratio, ratio));
    lines(report, measure, content, sheet, &caption, crate::report::short, values)
}

fn lines(
    report: &Report,
    measure: Measure,
    (contestants, sizes): Content<'_>,
    sheet: &Sheet<'_>,
    caption: &str,
    label: impl Fn(f64) -> String,
    values: impl Fn(&crate::Row) -> Option<(f64, f64, f64)>,
) -> Drawn {
    let points = |contestant: &str| -> Vec<(i32, (f64, f64, f64))> {
        let at = |(place, size): (usize, &u64)| {
            let found = report.row(contestant, measure, *size).and_then(&values)?;
            // A logarithmic axis has no place for zero.
            (found.0 > 0.0).then_some((place as i32, found))
        };
        sizes.iter().enumerate().filter_map(at).collect()
    };
    let drawn: Vec<(&str, Vec<_>)> = contestants.into_iter().map(|name| (name, points(name))).collect();
    let every = || drawn.iter().flat_map(|(_, points)| points.iter().map(|(_, values)| *values));
    let low = every().map(|(low, _, _)| low).fold(f64::INFINITY, f64::min);
    let high = every().map(|(_, _, high)| high).fold(0.0, f64::max);
    if !low.is_finite() {
        return Ok(());
    }

    // In tenths of a place: half a place before the first size, and room for the names after the last.
    let last = sizes.len() as i32 - 1;
    let end = last * 12 + 8;
    let mut chart = ChartBuilder::on(sheet)
        .caption(caption, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(80)
        .build_cartesian_2d(-5..end, (low / 1.3..high * 1.3).log_scale())?;
    chart
        .configure_mesh()
        .x_labels((last as usize + 2) * 2)
        .x_label_formatter(&|place| {
            let size = (place % 10 == 0).then(|| sizes.get(usize::try_from(place / 10).ok()?)).flatten();
            size.map_or(String::new(), |size| report.size_label(measure, *size))
        })
        .y_label_formatter(&|value| label(*value))
        .disable_x_mesh()
        .light_line_style(WHITE.mix(0.0))
        .label_style(("sans-serif", 13))
        .draw()?;
    for (place, (name, points)) in drawn.iter().enumerate() {
        let colour = Palette99::pick(place).to_rgba();
        let line = points.iter().map(|(x, (_, median, _))| (x * 10, *median));
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(3)));
        for (x, (low, median, high)) in points {
            chart.draw_series([PathElement::new([(x * 10, *low), (x * 10, *high)], colour.stroke_width(1))])?;
            chart.draw_series([Circle::new((x * 10, *median), 3, colour.filled())])?;
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw()?;
    Ok(())
}

/// A bar for each name, the first at the top, with a line from p10 to p90. Names lie beside them, however long.
fn draw_bars(bars: &[(String, [f64; 3])], caption: &str, label: impl Fn(f64) -> String, sheet: &Sheet<'_>) -> Drawn {
    let high = bars.iter().map(|(_, [.., high])| *high).fold(0.0, f64::max);
    if high <= 0.0 {
        return Ok(());
    }
    let longest = bars.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    // In tenths of a place, each bar in the middle of its own.
    let end = bars.len() as i32 * 10;
    let mut chart = ChartBuilder::on(sheet)
        .caption(caption, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(longest as u32 * 8)
        .build_cartesian_2d(0.0..high * 1.1, 0..end)?;
    chart
        .configure_mesh()
        .y_labels(bars.len() * 2 + 1)
        .y_label_formatter(&|place| {
            let from_top = (place % 10 == 5).then(|| usize::try_from((end - place) / 10).ok()).flatten();
            let bar = from_top.and_then(|place| bars.get(place));
            bar.map_or(String::new(), |(name, _)| name.clone())
        })
        .x_label_formatter(&|value| label(*value))
        .disable_y_mesh()
        .light_line_style(WHITE.mix(0.0))
        .label_style(("sans-serif", 13))
        .draw()?;
    for (place, (_, [low, median, high])) in bars.iter().enumerate() {
        let middle = end - 5 - place as i32 * 10;
        let colour = Palette99::pick(place).to_rgba();
        chart.draw_series([Rectangle::new([(0.0, middle - 3), (*median, middle + 3)], colour.mix(0.7).filled())])?;
        chart.draw_series([PathElement::new([(*low, middle), (*high, middle)], BLACK.stroke_width(2))])?;
    }
    Ok(())
}

/// The paper's figure 3: when each part of each message was copied in and out, successive messages
/// in alternating shades.
fn stripes(trace: &Trace, sheet: &Sheet<'_>) -> Drawn {
    let end_us = (trace.end_ns() / 1e3).max(0.001);
    let caption = format!(
        "Pulses of a burst of {} messages: one stripe is one copy, one shade one message",
        crate::report::bytes_label(trace.size)
    );
    let mut chart = ChartBuilder::on(sheet)
        .caption(caption, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(45)
        .y_label_area_size(110)
        .build_cartesian_2d(0.0..end_us * 1.01, 0.0..2.0)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(WHITE.mix(0.0))
        .y_labels(5)
        .y_label_formatter(&|row: &f64| match (row * 10.0).round() as i32 {
            5 => "copied out".to_owned(),
            15 => "copied in".to_owned(),
            _ => String::new(),
        })
        .x_desc("µs")
        .label_style(("sans-serif", 14))
        .draw()?;
    for (stripes, low) in [(&trace.copied_out, 0.15), (&trace.copied_in, 1.15)] {
        chart.draw_series(stripes.iter().flat_map(|stripe: &Stripe| {
            let shade = if stripe.message.is_multiple_of(2) { RGBColor(32, 74, 135) } else { RGBColor(138, 176, 222) };
            let corners = [(stripe.started_ns / 1e3, low), (stripe.ended_ns / 1e3, low + 0.7)];
            [Rectangle::new(corners, shade.filled()), Rectangle::new(corners, WHITE.stroke_width(1))]
        }))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Row;
    use crate::{FLOOR, Machine, Rounds, State};

    fn report() -> Report {
        let row = |contestant: &str, size, median: f64| Row {
            contestant: contestant.to_owned(),
            measure: Measure::LatencyNs,
            size,
            median,
            p10: median * 0.9,
            p90: median * 1.2,
            p99: median * 2.0,
            count: 3,
            of_floor: Some(median / 50.0),
            of_vi: None,
            cost: Default::default(),
        };
        Report {
            bench: "pipelining".to_owned(),
            command: String::new(),
            version: String::new(),
            machine: Machine::this(2, (0, 1)),
            network: None,
            state: State::Far,
            crossing_ns: Some(250.0),
            rounds: Rounds::default(),
            seconds: 1.0,
            notes: Vec::new(),
            rows: vec![row(FLOOR, 8192, 50.0), row(FLOOR, 65536, 60.0), row("adaptive", 8192, 55.0)],
            trace: Some(Trace {
                size: 8192,
                copied_in: vec![Stripe { message: 0, bytes: 8192, started_ns: 0.0, ended_ns: 400.0 }],
                copied_out: vec![Stripe { message: 0, bytes: 8192, started_ns: 100.0, ended_ns: 900.0 }],
            }),
        }
    }

    #[test]
    fn every_measure_and_the_trace_become_a_plot_that_names_what_it_shows() {
        let plots = all(&report(), Path::new("somewhere")).unwrap();
        let names: Vec<&str> = plots.iter().map(|(name, _)| name.as_str()).collect();
        let expected = ["pipelining-latency_ns.svg", "pipelining-latency_ns-of-floor.svg", "pipelining-trace.svg"];
        assert_eq!(names, expected);
        for (name, svg) in &plots {
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{name}");
        }
        for part in ["adaptive", "raw-ring", "8 KiB", "64 KiB", "far"] {
            assert!(plots[0].1.contains(part), "{part:?} is not in the plot");
        }
        assert!(plots[2].1.contains("copied in") && plots[2].1.matches("<rect").count() >= 4);
    }

    #[test]
    fn an_empty_trace_is_drawn_too() {
        let empty = Report { rows: Vec::new(), trace: Some(Trace::default()), ..report() };
        assert_eq!(all(&empty, Path::new("somewhere")).unwrap().len(), 1);
    }
}
