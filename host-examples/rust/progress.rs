//! How far it has come: a bar on a terminal, else a line now and then.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

use crate::units;

pub struct Progress {
    label: &'static str,
    total: Option<u64>,
    started: Instant,
    shown: Instant,
    /// Redraws one line.
    bar: bool,
    every: Duration,
}

impl Progress {
    pub fn new(label: &'static str, total: Option<u64>) -> Progress {
        let bar = stderr().is_terminal();
        let every = if bar { Duration::from_millis(200) } else { Duration::from_secs(10) };
        let now = Instant::now();
        Progress { label, total, started: now, shown: now, bar, every }
    }

    /// `done` frames of video.
    pub fn show(&mut self, done: u64) {
        if self.shown.elapsed() >= self.every {
            self.shown = Instant::now();
            let text = self.text(done);
            // Losing a line of progress is no reason to stop.
            let _ = if self.bar { write!(stderr(), "\r\x1b[K{text}") } else { writeln!(stderr(), "{text}") };
        }
    }

    fn text(&self, done: u64) -> String {
        let seconds = self.started.elapsed().as_secs_f64();
        let rate = done as f64 / seconds;
        let Some(total) = self.total.filter(|total| *total >= done && *total > 0) else {
            return format!("{} {done} frames, {rate:.1} frames/s", self.label);
        };
        let part = done as f64 / total as f64;
        let filled = (part * 30.0) as usize;
        let bar = format!("[{}{}] ", "#".repeat(filled), "-".repeat(30 - filled));
        let left = if done > 0 { units::clock((total - done) as f64 / rate) } else { "?".into() };
        format!(
            "{} {}{:3.0} %  {done}/{total} frames, {rate:.1} frames/s, {left} left",
            self.label,
            if self.bar { &bar } else { "" },
            part * 100.0
        )
    }

    /// Wipes the bar away. The seconds it took.
    pub fn end(&self) -> f64 {
        if self.bar {
            let _ = write!(stderr(), "\r\x1b[K");
        }
        self.started.elapsed().as_secs_f64()
    }
}
