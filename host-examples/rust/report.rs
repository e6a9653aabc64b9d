//! One page about two clips: a slider between them, their difference, PSNR per frame, figures, pictures of plans.
//!
//! The page is one file that needs nothing else. `report.html` is the page; this fills it in.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use crate::draft::Draft;
use crate::files::{self, Sink, Source};
use crate::tensor::{Dtype, FrameKind};
use crate::{Result, memory, picture};

/// Frames to look at, and the most pixels of one from left to right.
const MOST_PICTURES: usize = 8;
const MOST_WIDTH: usize = 768;
/// The most points of the plot. Of more frames the worst of each group is drawn.
const MOST_POINTS: usize = 600;
/// Where two frames are equal.
const EQUAL_DB: f64 = 100.0;
const PAGE: &str = include_str!("report.html");

/// Collects both clips frame by frame, at constant memory.
pub struct Report {
    title: String,
    /// PSNR of each frame, in dB.
    psnr: Vec<f64>,
    /// Sum of squared differences of samples, and their number.
    squares: (f64, usize),
    /// Every `step`-th frame: its number and both pictures as PNGs.
    pictures: Vec<(usize, [Vec<u8>; 2])>,
    step: usize,
    figures: Vec<(String, String)>,
    plans: Vec<String>,
    /// The number of the first frame in its clip.
    first: u64,
}

impl Report {
    /// `first`: the number of the first frame in its clip.
    pub fn new(title: String, first: u64) -> Report {
        Report {
            title,
            psnr: Vec::new(),
            squares: (0.0, 0),
            pictures: Vec::new(),
            step: 1,
            figures: Vec::new(),
            plans: Vec::new(),
            first,
        }
    }

    /// The next frame of both clips: interleaved RGB from 0 to 255.
    pub fn frame(&mut self, width: usize, before: &[f32], after: &[f32]) -> Result<()> {
        let squares: f64 = before.iter().zip(after).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        self.psnr.push(psnr(squares, before.len()));
        self.squares = (self.squares.0 + squares, self.squares.1 + before.len());
        let number = self.psnr.len() - 1;
        if number.is_multiple_of(self.step) {
            if self.pictures.len() == MOST_PICTURES {
                self.step *= 2;
                self.pictures.retain(|(number, _)| number.is_multiple_of(self.step));
            }
            if number.is_multiple_of(self.step) {
                self.pictures.push((number, [picture(width, before)?, picture(width, after)?]));
            }
        }
        Ok(())
    }

    /// A line of the table.
    pub fn figure(&mut self, name: &str, value: impl std::fmt::Display) {
        self.figures.push((name.into(), value.to_string()));
    }

    /// A picture of the plan of a job, by what lies in each device's memory over time.
    pub fn plan(&mut self, timelines: Vec<Value>) -> Result<()> {
        self.plans.push(picture::plan(&json!({ "devices": timelines }))?);
        Ok(())
    }

    pub fn write(mut self, to: Draft) -> Result<()> {
        let worst = (0..self.psnr.len()).min_by(|a, b| self.psnr[*a].total_cmp(&self.psnr[*b]));
        if let Some(worst) = worst {
            let own = [
                ("PSNR".into(), db(psnr(self.squares.0, self.squares.1))),
                (
                    "worst frame".into(),
                    format!("{}: {}; there are {}", self.number(worst), db(self.psnr[worst]), self.psnr.len()),
                ),
            ];
            self.figures.splice(0..0, own);
        }
        let page = [
            ("title", escape(&self.title)),
            ("figures", self.figure_rows()),
            ("frames", self.frame_list()),
            ("plot", self.plot(worst.unwrap_or(0))),
            ("plans", self.plans.iter().map(|svg| plan_image(svg)).collect()),
        ];
        let mut text = PAGE.to_string();
        for (name, value) in page {
            text = text.replace(&format!("{{{{{name}}}}}"), &value);
        }
        to.write(&text)
    }

    /// Of a frame in the clip, counted from 0 as --frames does.
    fn number(&self, index: usize) -> u64 {
        self.first + index as u64
    }

    fn figure_rows(&self) -> String {
        let row = |(name, value): &(String, String)| format!("<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
        self.figures.iter().map(row).collect()
    }

    /// The pictures as a JavaScript list.
    fn frame_list(&self) -> String {
        let frame = |(number, [before, after]): &(usize, [Vec<u8>; 2])| {
            let [before, after] = [before, after].map(|png| base64(png));
            let psnr = db(self.psnr[*number]);
            format!("{{number:{},psnr:\"{psnr}\",before:\"{before}\",after:\"{after}\"}}", self.number(*number))
        };
        format!("[{}]", self.pictures.iter().map(frame).collect::<Vec<_>>().join(","))
    }

    /// PSNR per frame.
    fn plot(&self, worst: usize) -> String {
        const SIZE: (f64, f64) = (720.0, 200.0);
        const PAD: (f64, f64) = (52.0, 12.0);
        let group = self.psnr.len().div_ceil(MOST_POINTS).max(1);
        let points: Vec<f64> =
            self.psnr.chunks(group).map(|group| group.iter().copied().fold(EQUAL_DB, f64::min)).collect();
        let (least, most) = points.iter().fold((EQUAL_DB, 0.0f64), |(low, high), db| (low.min(*db), high.max(*db)));
        let (least, most) = ((least - 1.0).floor(), (most + 1.0).ceil());
        let x = |frame: usize| {
            let last = self.psnr.len().saturating_sub(1).max(1);
            PAD.0 + (SIZE.0 - PAD.0 - PAD.1) * frame as f64 / last as f64
        };
        let y = |db: f64| PAD.1 + (SIZE.1 - 3.0 * PAD.1) * (most - db) / (most - least).max(1.0);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"PSNR per frame, from {least} to {most} dB\" \
             data-first=\"{}\" data-last=\"{}\" data-frames=\"{}\" data-number=\"{}\">",
            SIZE.0,
            SIZE.1,
            x(0),
            x(self.psnr.len().saturating_sub(1)),
            self.psnr.len(),
            self.first
        );
        for db in [least, (least + most) / 2.0, most] {
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{} {:.1}H{}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{db} dB</text>",
                PAD.0,
                y(db),
                SIZE.0 - PAD.1,
                PAD.0 - 6.0,
                y(db) + 4.0
            );
        }
        let line: Vec<String> =
            points.iter().enumerate().map(|(i, db)| format!("{:.1},{:.1}", x(i * group), y(*db))).collect();
        let _ = write!(svg, "<polyline class=\"line\" points=\"{}\"/>", line.join(" "));
        if let Some(db) = self.psnr.get(worst) {
            let _ = write!(
                svg,
                "<circle class=\"worst\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\"/>",
                x(worst),
                y(db.min(EQUAL_DB))
            );
        }
        let _ = write!(
            svg,
            "<path id=\"cursor\" d=\"M0 {}V{:.1}\"/><text x=\"{}\" y=\"{}\">frame {}</text><text x=\"{}\" y=\"{}\" \
             text-anchor=\"end\">frame {}</text></svg>",
            PAD.1,
            y(least),
            PAD.0,
            SIZE.1 - 6.0,
            self.first,
            SIZE.0 - PAD.1,
            SIZE.1 - 6.0,
            self.number(self.psnr.len().saturating_sub(1))
        );
        svg
    }
}

fn plan_image(svg: &str) -> String {
    let data = base64(svg.as_bytes());
    format!(
        "<div class=\"wide\" tabindex=\"0\"><img alt=\"Memory and copies of the plan over time\" \
         src=\"data:image/svg+xml;base64,{data}\"></div>"
    )
}

fn psnr(squares: f64, count: usize) -> f64 {
    (10.0 * (255.0f64.powi(2) * count as f64 / squares).log10()).min(EQUAL_DB)
}

fn db(psnr: f64) -> String {
    if psnr >= EQUAL_DB { "equal".into() } else { format!("{psnr:.2} dB") }
}

/// A PNG of 8 bits, made smaller by whole numbers until it fits the page.
fn picture(width: usize, rgb: &[f32]) -> Result<Vec<u8>> {
    let (by, height) = (width.div_ceil(MOST_WIDTH).max(1), rgb.len() / 3 / width);
    let small = FrameKind::pixels(Dtype::U8, width.div_ceil(by), height.div_ceil(by));
    let mut sums = memory::collected(small.elements(), std::iter::repeat((0.0, 0u16)), "a picture of the report")?;
    for (pixel, colours) in rgb.chunks_exact(3).enumerate() {
        let at = 3 * (pixel / width / by * small.width + pixel % width / by);
        for (sum, colour) in sums[at..].iter_mut().zip(colours) {
            *sum = (sum.0 + colour, sum.1 + 1);
        }
    }
    let pixels = sums.iter().map(|(sum, count)| (sum / f32::from(*count)).round() as u8);
    let pixels = memory::collected(sums.len(), pixels, "a picture of the report")?;
    let mut png = Vec::new();
    files::encode_rgb(&mut png, small, &pixels)?;
    Ok(png)
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for digit in 0..4 {
            let value = (bits >> (18 - 6 * digit) & 63) as usize;
            text.push(if digit <= group.len() { DIGITS[value] as char } else { '=' });
        }
    }
    text
}

/// Braces too: they mark where the page is filled in.
fn escape(text: &str) -> String {
    picture::escape(text).replace('{', "&#123;")
}

/// A source and a sink that show a report every frame on its way in and out.
pub fn watch(
    (before, source): (FrameKind, Box<dyn Source>),
    (after, sink): (FrameKind, Box<dyn Sink>),
    report: &Arc<Mutex<Report>>,
) -> (Box<dyn Source>, Box<dyn Sink>) {
    let waiting = Arc::new(Mutex::new(VecDeque::new()));
    let sink = WatchedSink { sink, kinds: (before, after), waiting: Arc::clone(&waiting), report: Arc::clone(report) };
    (Box::new(WatchedSource { source, waiting }), Box::new(sink))
}

/// Frames that went in and have not come out.
type Waiting = Arc<Mutex<VecDeque<Vec<u8>>>>;

struct WatchedSource {
    source: Box<dyn Source>,
    waiting: Waiting,
}

impl Source for WatchedSource {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        let more = self.source.read(frame)?;
        if more {
            let copy = memory::collected(frame.len(), frame.iter().copied(), "a frame of the report")?;
            locked(&self.waiting).push_back(copy);
        }
        Ok(more)
    }
}

struct WatchedSink {
    sink: Box<dyn Sink>,
    kinds: (FrameKind, FrameKind),
    waiting: Waiting,
    report: Arc<Mutex<Report>>,
}

impl Sink for WatchedSink {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        if let Some(before) = locked(&self.waiting).pop_front() {
            let (before, after) = (self.kinds.0.rgb(&before)?, self.kinds.1.rgb(frame)?);
            locked(&self.report).frame(self.kinds.0.width, &before, &after)?;
        }
        self.sink.write(frame)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.sink.finish()
    }
}

/// Whoever panicked with the lock ends the command anyway.
pub fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        let known = [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")];
        for (text, encoded) in known {
            assert_eq!(base64(text.as_bytes()), encoded);
        }
    }

    #[test]
    fn long_clips_keep_few_pictures_and_every_figure() {
        let mut report = Report::new("t".into(), 0);
        for i in 0..1000 {
            let after = [if i == 700 { 60.0 } else { 101.0 }; 24];
            report.frame(4, &[100.0; 24], &after).unwrap();
        }
        assert!(report.pictures.len() <= MOST_PICTURES && report.pictures.len() * 2 >= MOST_PICTURES);
        assert_eq!(report.psnr.len(), 1000);
        assert_eq!(report.psnr.iter().position(|psnr| *psnr < 20.0), Some(700));
        assert!((report.psnr[0] - 48.13).abs() < 0.01, "{}", report.psnr[0]);
        assert!(report.plot(700).matches(',').count() <= MOST_POINTS + 2);
    }

    #[test]
    fn every_depth_is_compared_on_one_scale() {
        let [deep, flat] = [Dtype::U16, Dtype::U8].map(|dtype| FrameKind::pixels(dtype, 2, 1));
        let mut report = Report::new("t".into(), 0);
        report.frame(2, &deep.rgb(&[0xff; 12]).unwrap(), &flat.rgb(&[255; 6]).unwrap()).unwrap();
        assert_eq!(report.psnr, [EQUAL_DB]);
    }

    #[test]
    fn pictures_shrink_to_the_page() {
        let png = picture(1537, &vec![7.0; 3 * 1537 * 5]).unwrap();
        let size = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap());
        assert_eq!((size(16), size(20)), (513, 2));
    }
}
