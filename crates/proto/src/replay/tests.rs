use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// The same rules over a set.
#[derive(Default)]
struct Oracle {
    seen: BTreeSet<u64>,
}

impl Oracle {
    fn would_accept(&self, number: u64) -> bool {
        let highest = self.seen.last().copied();
        !self.seen.contains(&number) && highest.is_none_or(|highest| highest.saturating_sub(number) < 4096)
    }
}

proptest! {
    #[test]
    fn the_bitmap_agrees_with_a_set(
        start in prop_oneof![Just(0u64), Just(u64::MAX - 20_000), any::<u64>()],
        steps in prop::collection::vec((prop_oneof![
            8 => -200i64..200,
            4 => -4_200i64..4_200,
            1 => -20_000i64..20_000,
        ], any::<bool>()), 1..400),
    ) {
        let (mut window, mut oracle) = (ReplayWindow::new(), Oracle::default());
        let mut number = start;
        for (step, authentic) in steps {
            number = number.saturating_add_signed(step);
            let expected = oracle.would_accept(number);
            prop_assert_eq!(window.would_accept(number), expected, "number {}", number);
            if authentic {
                prop_assert_eq!(window.accept(number), expected);
                if expected {
                    oracle.seen.insert(number);
                }
            }
            prop_assert_eq!(window.highest(), oracle.seen.last().copied());
        }
        // Every number near the end, not only those that were asked for.
        if let Some(highest) = window.highest() {
            for number in highest.saturating_sub(5_000)..=highest.saturating_add(70) {
                prop_assert_eq!(window.would_accept(number), oracle.would_accept(number), "number {}", number);
            }
        }
    }
}

#[test]
fn the_window_is_exactly_4096_wide() {
    let mut window = ReplayWindow::new();
    assert!(window.accept(10_000));
    assert!(window.would_accept(10_000 - 4_095));
    assert!(!window.would_accept(10_000 - 4_096));
    assert!(window.accept(10_000 - 4_095));
    assert!(!window.accept(10_000 - 4_095), "a replay");
}

#[test]
fn asking_changes_nothing() {
    let mut window = ReplayWindow::new();
    window.accept(5);
    for _ in 0..3 {
        assert!(window.would_accept(1_000_000) && window.would_accept(4) && !window.would_accept(5));
    }
    assert_eq!(window.highest(), Some(5));
}

#[test]
fn the_last_number_of_all_is_no_special_case() {
    let mut window = ReplayWindow::new();
    assert!(window.accept(u64::MAX - 70) && window.accept(u64::MAX) && !window.accept(u64::MAX));
    assert!(window.accept(u64::MAX - 1) && !window.accept(u64::MAX - 70));
}
