//! What is done about damaged input: fewer frames than the container says, and complaints of the decoder, are errors
//! that name the frame, unless the user keeps what can be read.

use std::path::{Path, PathBuf};

use super::index::{Index, Roll};
use super::probe::Probe;
use crate::units::counted;
use crate::{Result, say};

pub struct Check {
    path: PathBuf,
    found: Probe,
    pub index: Index,
    roll: Roll,
    keep: bool,
    /// The first damage, if it is kept.
    kept: Option<String>,
}

impl Check {
    pub fn new(path: &Path, index: Index, found: &Probe, keep: bool) -> Result<Check> {
        let (path, found, roll) = (path.to_owned(), found.clone(), Roll::new(&index));
        let mut check = Check { path, found, index, roll, keep, kept: None };
        if let Some(why) = check.index.damage.take() {
            let last = check.index.packets as usize;
            check.damaged(check.index.locate(&check.path, &check.found), last, &why)?;
        }
        Ok(check)
    }

    /// A frame of this time has come, after `read` others.
    pub fn frame(&mut self, time: i64, read: usize) -> Result<()> {
        self.roll.take(time).map_or(Ok(()), |missing| self.missing(missing, read))
    }

    /// ffmpeg complains, about frame `read` or a later one.
    pub fn complaints(&mut self, lines: &[String], read: usize) -> Result<()> {
        match lines.iter().find(|line| self.found.concerns(line)).filter(|_| self.kept.is_none()) {
            Some(line) => self.damaged(self.index.locate(&self.path, &self.found), read, line),
            None => Ok(()),
        }
    }

    /// The clip has ended after `read` frames. `done`: whether ffmpeg was content.
    pub fn end(&mut self, read: usize, done: bool) -> Result<()> {
        self.roll.end().map_or(Ok(()), |missing| self.missing(missing, read))?;
        if !done {
            self.damaged(None, read, "ffmpeg failed")?;
        }
        if let Some(kept) = &self.kept {
            say::warn(format_args!("{kept}; {} can be read and are kept", counted(read as u64, "frame")));
        }
        Ok(())
    }

    fn missing(&mut self, time: i64, read: usize) -> Result<()> {
        let place = (self.index.number(time), time as f64 / self.found.ticks.per_second());
        self.damaged(Some(place), read, "it cannot be decoded")
    }

    /// `place`: number and seconds of the frame. Where it is not known, `near` is.
    fn damaged(&mut self, place: Option<(usize, f64)>, near: usize, why: &str) -> Result<()> {
        let place = place.map(|(number, seconds)| format!("at frame {number} ({seconds:.3} s)"));
        let place = place.unwrap_or_else(|| format!("near frame {near}"));
        let text = format!("{} is damaged {place}: {why}", self.path.display());
        if !self.keep {
            return Err(format!("{text}; get it anew, or add --keep-damaged to go on with what can be read"));
        }
        self.kept.get_or_insert(text);
        Ok(())
    }
}
