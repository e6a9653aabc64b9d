//! Pictures that are frames of one clip: all of a folder, or those of a pattern such as f%04d.png.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::tags::Tags;
use super::{Sink, openexr, pngs};
use crate::Result;
use crate::draft::{self, Draft};
use crate::tensor::FrameKind;

/// A name with a number in it, as ffmpeg writes such names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    folder: PathBuf,
    before: String,
    /// The least number of digits.
    digits: usize,
    after: String,
}

/// Of the largest number.
const MOST_DIGITS: usize = 20;

impl Pattern {
    /// `None` for a name without %d, %3d or %04d, or with more digits than a number has.
    pub fn parse(path: &Path) -> Option<Pattern> {
        let name = path.file_name()?.to_str()?;
        let (before, rest) = name.split_once('%')?;
        let (digits, after) = rest.split_once('d')?;
        let digits = if digits.is_empty() { 1 } else { digits.parse().ok().filter(|digits| *digits <= MOST_DIGITS)? };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(Pattern { folder: folder.to_owned(), before: before.into(), digits, after: after.into() })
    }

    fn name(&self, number: u64) -> String {
        let digits = self.digits;
        format!("{}{number:0digits$}{}", self.before, self.after)
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(self.name(number))
    }

    /// The numbers that are in the folder, in order, whatever has them.
    fn numbers(&self) -> Result<Vec<u64>> {
        let folder = self.folder.display();
        let entries = std::fs::read_dir(&self.folder).map_err(|why| format!("{folder} cannot be read: {why}"))?;
        let number = |name: &str| {
            let digits = name.strip_prefix(&self.before)?.strip_suffix(&self.after)?;
            digits.parse::<u64>().ok().filter(|number| self.name(*number) == name)
        };
        let mut numbers: Vec<u64> = entries.flatten().filter_map(|e| number(e.file_name().to_str()?)).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// The files, in the order of their numbers. One that is missing between two others is an error.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        let (folder, numbers) = (self.folder.display(), self.numbers()?);
        let Some(first) = numbers.first() else {
            return Err(format!("{folder} has no file like {}; check the pattern", self.name(1)));
        };
        let missing = numbers.iter().zip(*first..).find(|(found, expected)| *found != expected);
        match missing {
            Some((_, number)) => Err(format!("{} is missing; number the frames without gaps", self.name(number))),
            None => Ok(numbers.iter().map(|number| self.path(*number)).collect()),
        }
    }
}

/// Writes pictures into a folder of their own, or beside what is there. They get their names when all are whole.
pub struct Sequence {
    draft: Draft,
    /// Where they go one by one; else the folder gets its name.
    beside: Option<Pattern>,
    format: Format,
    kind: FrameKind,
    ratio: Option<(u32, u32)>,
    count: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Png,
    Exr,
}

impl Sequence {
    pub fn folder(path: &Path, kind: FrameKind, tags: &Tags) -> Result<Sequence> {
        // Without a slash at its end, as it would be part of the temporary name.
        let path: PathBuf = path.components().collect();
        if std::fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(format!("the folder {} is not empty; name a new one", path.display()));
        }
        let (draft, ratio) = (Draft::folder(&path)?, tags.ratio());
        Ok(Sequence { draft, beside: None, format: Format::Png, kind, ratio, count: 0 })
    }

    /// Pictures beside what is there. `path` is the pattern's own name, which their folder has meanwhile.
    pub fn beside(path: &Path, pattern: Pattern, kind: FrameKind, tags: &Tags) -> Result<Sequence> {
        let format = match pattern.after.as_str() {
            ".png" => Format::Png,
            ".exr" => Format::Exr,
            _ => return Err(format!("{}: pictures of a pattern are written as .png or .exr", pattern.name(1))),
        };
        let (draft, ratio) = (Draft::folder(path)?, tags.ratio());
        pattern.numbers()?.iter().try_for_each(|number| draft::refuse_taken(&pattern.path(*number)))?;
        Ok(Sequence { draft, beside: Some(pattern), format, kind, ratio, count: 0 })
    }

    fn name(&self, number: u64) -> String {
        self.beside.as_ref().map_or_else(|| format!("frame-{number:06}.png"), |pattern| pattern.name(number))
    }
}

impl Sink for Sequence {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        self.count += 1;
        let path = self.draft.path.join(self.name(self.count));
        let failed = |why| format!("{} cannot be written: {why}; make room", path.display());
        let file = File::create_new(&path).map_err(failed)?;
        match self.format {
            Format::Png => pngs::encode(&file, self.kind, frame, self.ratio)?,
            Format::Exr => openexr::encode(&file, self.kind, frame)?,
        }
        // The folder gets its name when all of it lies on the disk.
        file.sync_all().map_err(failed)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Some(pattern) = &self.beside else { return self.draft.finish() };
        // None gets its name unless all can.
        (1..=self.count).try_for_each(|number| draft::refuse_taken(&pattern.path(number)))?;
        for number in 1..=self.count {
            let (from, to) = (self.draft.path.join(pattern.name(number)), pattern.path(number));
            std::fs::rename(&from, &to).map_err(|why| format!("{} cannot be given its name: {why}", to.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_those_of_ffmpeg() {
        let parsed = |name: &str| Pattern::parse(Path::new(name));
        assert_eq!(parsed("a/f%04d.png").unwrap().name(7), "f0007.png");
        assert_eq!(parsed("%d.exr").unwrap().name(12), "12.exr");
        assert_eq!(parsed("x%3dy.png").unwrap().name(1000), "x1000y.png");
        assert!(
            ["f.png", "100%.png", "f%s.png", "f%xd.png", "f%021d.png", "f%099999d.png"]
                .iter()
                .all(|name| parsed(name).is_none())
        );
    }
}
