//! How far it has come: a bar on a terminal, else a line now and then.

use std::borrow::Cow;
use std::io::{IsTerminal, stderr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::{say, units};

const WITH_TOTAL: &str = "{msg} [{bar:30}] {percent:>3} %  {done}/{total}, {speed}, {eta} left";
const WITHOUT_TOTAL: &str = "{msg} {done}, {speed}";
/// Between two lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(10);

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Frames,
    Bytes,
}

impl Unit {
    fn count(self, count: u64) -> String {
        match self {
            Unit::Frames => format!("{count} frames"),
            Unit::Bytes => units::bytes(count),
        }
    }

    fn rate(self, each_second: f64) -> String {
        match self {
            Unit::Frames => format!("{each_second:.1} frames/s"),
            Unit::Bytes => format!("{}/s", units::bytes(each_second as u64)),
        }
    }
}

/// A word of the bar's template.
fn word(of: impl Fn(&ProgressState) -> String + Clone) -> impl Fn(&ProgressState, &mut dyn std::fmt::Write) + Clone {
    move |state, out| {
        let _ = out.write_str(&of(state));
    }
}

pub struct Progress {
    bar: ProgressBar,
    unit: Unit,
    started: Instant,
    /// When the last line was written; `None` on a terminal, which has the bar.
    line: Option<Instant>,
}

impl Progress {
    /// Of frames of video.
    pub fn new(label: impl Into<Cow<'static, str>>, total: Option<u64>) -> Progress {
        Progress::of(Unit::Frames, label, total)
    }

    pub fn of(unit: Unit, label: impl Into<Cow<'static, str>>, total: Option<u64>) -> Progress {
        let template = if total.is_some() { WITH_TOTAL } else { WITHOUT_TOTAL };
        let style = ProgressStyle::with_template(template).expect("a valid template").progress_chars("#--");
        let style = style
            .with_key("done", word(move |state| unit.count(state.pos())))
            .with_key("total", word(move |state| unit.count(state.len().unwrap_or(0))))
            .with_key("speed", word(move |state| unit.rate(state.per_sec())));
        let quiet = say::QUIET.load(Ordering::Relaxed);
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(total, target).with_style(style);
        bar.set_message(label);
        let started = Instant::now();
        Progress { bar, unit, started, line: (!quiet && !stderr().is_terminal()).then_some(started) }
    }

    /// `done` of what is counted.
    pub fn show(&mut self, done: u64) {
        self.bar.set_position(done);
        if let Some(line) = self.line.as_mut().filter(|line| line.elapsed() >= EVERY) {
            *line = Instant::now();
            let rate = self.unit.rate(done as f64 / self.started.elapsed().as_secs_f64());
            let of = self.bar.length().map(|total| format!(" of {}", self.unit.count(total))).unwrap_or_default();
            say::note(format_args!("{} {}{of}, {rate}", self.bar.message(), self.unit.count(done)));
        }
    }

    /// Wipes the bar away. The seconds it took.
    pub fn end(&self) -> f64 {
        self.bar.finish_and_clear();
        self.started.elapsed().as_secs_f64()
    }
}
