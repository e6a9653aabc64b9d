//! What a video file has beside its pictures: sound, subtitles, chapters, a title. What an output keeps of it, and what
//! is lost.

use super::codec::Container;
use crate::units::counted;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    /// Among all streams of its file.
    pub index: u64,
    pub codec: String,
    /// How much later ffmpeg's zero is when it reads this stream alone, in microseconds.
    pub lead: i64,
}

#[derive(Debug, Clone, Default)]
pub struct Extras {
    pub sound: Vec<Stream>,
    pub subtitles: Vec<Stream>,
    pub attachments: u64,
    pub chapters: u64,
    pub title: String,
    /// What no output keeps, in words.
    pub unkept: Vec<String>,
}

/// Subtitles that are text. All others are pictures.
const TEXTS: [&str; 6] = ["subrip", "ass", "ssa", "webvtt", "mov_text", "text"];

/// What becomes of the extras in a container.
#[derive(Default)]
pub struct Kept {
    /// For ffmpeg, whose second input is the file that has the extras.
    pub arguments: Vec<String>,
    /// How much later its zero is than that of the file, in microseconds.
    pub lead: i64,
    /// In words, each.
    pub lost: Vec<String>,
    /// Sentences.
    pub changed: Vec<String>,
}

impl Extras {
    /// Whether a second look into the file is worth it.
    pub fn are_any(&self) -> bool {
        let streams = !self.sound.is_empty() || !self.subtitles.is_empty() || self.attachments > 0;
        streams || self.chapters > 0 || !self.title.is_empty()
    }

    /// In a container of ffmpeg's.
    pub fn kept(&self, container: &Container) -> Kept {
        let mut kept = Kept { lost: self.unkept.clone(), ..Kept::default() };
        let mut add = |words: &[&str]| kept.arguments.extend(words.iter().map(|word| (*word).to_owned()));
        for (number, stream) in self.sound.iter().enumerate() {
            let codec = container.sound_codec(&stream.codec);
            add(&["-map", &format!("1:{}", stream.index), &format!("-c:a:{number}"), codec]);
            if codec != "copy" {
                let (from, to, name) = (&stream.codec, codec.trim_start_matches("lib"), container.name);
                kept.changed.push(format!("sound: .{name} holds no {from}, so it is written as {to}; .mkv keeps it"));
            }
        }
        let mut leads: Vec<i64> = self.sound.iter().map(|stream| stream.lead).collect();
        let mut written = 0;
        for stream in &self.subtitles {
            match container.subtitle_codec(&stream.codec, TEXTS.contains(&stream.codec.as_str())) {
                Some(codec) => {
                    add(&["-map", &format!("1:{}", stream.index), &format!("-c:s:{written}"), codec]);
                    leads.push(stream.lead);
                    written += 1;
                }
                None => kept.lost.push(format!("subtitles ({})", stream.codec)),
            }
        }
        match (self.attachments, container.holds_attachments()) {
            (0, _) => {}
            (_, true) => add(&["-map", "1:t", "-c:t", "copy"]),
            (count, false) => kept.lost.push(counted(count, "attachment")),
        }
        add(&["-map_metadata", "1", "-map_chapters", "1"]);
        kept.lead = leads.into_iter().min().unwrap_or(0);
        kept
    }

    /// What is lost where there are only pictures, in words.
    pub fn all(&self) -> Vec<String> {
        let titled = (!self.title.is_empty()).then(|| "the title".to_owned());
        let names = |streams: &[Stream]| streams.iter().map(|s| s.codec.as_str()).collect::<Vec<_>>().join(", ");
        let streams = |what: &str, of: &[Stream]| (!of.is_empty()).then(|| format!("{what} ({})", names(of)));
        let counts = [(self.attachments, "attachment"), (self.chapters, "chapter")];
        let counts = counts.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| counted(count, what));
        let kept = [streams("sound", &self.sound), streams("subtitles", &self.subtitles), titled];
        self.unkept.iter().cloned().chain(kept.into_iter().flatten()).chain(counts).collect()
    }
}
