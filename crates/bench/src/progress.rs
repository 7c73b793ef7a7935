//! A progress bar on the terminal, for as long as there is one.

use crate::{Options, State};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::Instant;

/// How far a run is. Draws nothing where standard error is not a terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
    began: Instant,
}

impl Progress {
    pub(crate) fn new(options: &Options, began: Instant) -> Progress {
        if !options.progress {
            return Progress { bar: ProgressBar::hidden(), began };
        }
        let bar = ProgressBar::new((options.seconds * 1000.0) as u64);
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {msg}").expect("a correct template");
        bar.set_style(style);
        bar.set_prefix(options.bench.name());
        Progress { bar, began }
    }

    /// Says what is being done.
    pub(crate) fn say(&self, what: &str) {
        self.bar.set_position(self.began.elapsed().as_millis() as u64);
        self.bar.set_message(what.to_owned());
    }

    /// A step of a round is done.
    pub(crate) fn step(&self, round: u32, state: State) {
        if !self.bar.is_hidden() {
            self.say(&format!("round {}, {state}", round + 1));
        }
    }

    /// Takes the bar away.
    pub(crate) fn done(&self) {
        self.bar.finish_and_clear();
    }
}
