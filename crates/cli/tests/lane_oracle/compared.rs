//! Two traces, line by line.

use std::collections::BTreeMap;
use std::fmt;

/// Where a seed went another way for the first time; all that follows in it follows from that.
pub struct Difference {
    pub seed: u64,
    before: Vec<String>,
    expected: String,
    found: String,
}

impl Difference {
    /// Whether there is nothing to compare with, rather than something else.
    pub fn is_missing(&self) -> bool {
        self.found == MISSING
    }
}

/// The first difference of each seed.
pub fn first_differences(reference: &str, compared: &str) -> Vec<Difference> {
    let compared = by_seed(compared);
    let mut differences = Vec::new();
    for (seed, expected) in by_seed(reference) {
        let found = compared.get(&seed).map(Vec::as_slice).unwrap_or_default();
        let longest = expected.len().max(found.len());
        let Some(at) = (0..longest).find(|at| expected.get(*at) != found.get(*at)) else { continue };
        let line = |lines: &[&str]| lines.get(at).map_or(MISSING.to_owned(), |line| (*line).to_owned());
        differences.push(Difference {
            seed,
            before: expected[at.saturating_sub(LINES_BEFORE)..at].iter().map(|line| (*line).to_owned()).collect(),
            expected: line(&expected),
            found: line(found),
        });
        if found.last().is_none_or(|line| !line.ends_with(COMPLETE)) {
            // The process ended in this seed: the others were not run.
            break;
        }
    }
    differences
}

/// A line that is not ended counts as another one than the same line ended.
fn by_seed(text: &str) -> BTreeMap<u64, Vec<&str>> {
    let mut seeds = BTreeMap::new();
    let mut lines: &mut Vec<&str> = seeds.entry(0).or_default();
    for line in text.split_inclusive(COMPLETE) {
        if let Some(seed) = line.strip_prefix("seed ").and_then(|seed| seed.trim().parse().ok()) {
            lines = seeds.entry(seed).or_default();
        } else if line != "end\n" {
            lines.push(line);
        }
    }
    seeds
}

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "seed {} goes another way:", self.seed)?;
        for line in &self.before {
            write!(formatter, "      {line}")?;
        }
        writeln!(formatter, "tcp   {}", self.expected.trim_end())?;
        write!(formatter, "here  {}", self.found.trim_end())
    }
}

const LINES_BEFORE: usize = 20;
const COMPLETE: char = '\n';
const MISSING: &str = "(nothing)";
