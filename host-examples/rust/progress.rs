//! How far it has come: a bar on a terminal, else a line now and then.

use std::borrow::Cow;
use std::io::{IsTerminal, stderr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::say;

const WITH_TOTAL: &str = "{msg} [{bar:30}] {percent:>3} %  {pos}/{len} frames, {per_sec}, {eta} left";
const WITHOUT_TOTAL: &str = "{msg} {pos} frames, {per_sec}";
/// Between two lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(10);

pub struct Progress {
    bar: ProgressBar,
    started: Instant,
    /// When the last line was written; `None` on a terminal, which has the bar.
    line: Option<Instant>,
}

impl Progress {
    pub fn new(label: impl Into<Cow<'static, str>>, total: Option<u64>) -> Progress {
        let template = if total.is_some() { WITH_TOTAL } else { WITHOUT_TOTAL };
        let style = ProgressStyle::with_template(template).expect("a valid template").progress_chars("#--");
        let style = style.with_key("per_sec", |state: &indicatif::ProgressState, w: &mut dyn std::fmt::Write| {
            let _ = write!(w, "{:.1} frames/s", state.per_sec());
        });
        let quiet = say::QUIET.load(Ordering::Relaxed);
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(total, target).with_style(style);
        bar.set_message(label);
        let started = Instant::now();
        Progress { bar, started, line: (!quiet && !stderr().is_terminal()).then_some(started) }
    }

    /// `done` frames of video.
    pub fn show(&mut self, done: u64) {
        self.bar.set_position(done);
        if let Some(line) = self.line.as_mut().filter(|line| line.elapsed() >= EVERY) {
            *line = Instant::now();
            let rate = done as f64 / self.started.elapsed().as_secs_f64();
            let of = self.bar.length().map(|total| format!("/{total}")).unwrap_or_default();
            say::note(format_args!("{} {done}{of} frames, {rate:.1} frames/s", self.bar.message()));
        }
    }

    /// Wipes the bar away. The seconds it took.
    pub fn end(&self) -> f64 {
        self.bar.finish_and_clear();
        self.started.elapsed().as_secs_f64()
    }
}
