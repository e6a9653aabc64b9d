//! Between RGB and the planes of video: luma and two chromas, the chromas often at half the resolution.
//!
//! y' = kr R + kg G + kb B, with the weights of BT.601 or BT.709; chroma is the scaled difference of blue and red to
//! it. Limited range puts luma into 16..235 and chroma into 16..240 (of 8 bits; more bits are shifted), full range uses
//! all. Halved chroma is interpolated linearly on the way in and filtered on the way out, at the place its samples sit.

use crate::{Result, memory};

/// How luma is weighed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Matrix {
    #[value(name = "601")]
    Bt601,
    #[value(name = "709")]
    Bt709,
}

impl Matrix {
    /// Files that do not say are taken as players take them: BT.709 from 720p on.
    pub fn usual(width: usize, height: usize) -> Matrix {
        if width >= 1280 || height > 576 { Matrix::Bt709 } else { Matrix::Bt601 }
    }

    /// As ffmpeg spells it.
    pub fn name(self) -> &'static str {
        match self {
            Matrix::Bt601 => "bt601",
            Matrix::Bt709 => "bt709",
        }
    }

    /// Red and blue; green is what is left.
    fn weights(self) -> (f32, f32) {
        match self {
            Matrix::Bt601 => (0.299, 0.114),
            Matrix::Bt709 => (0.2126, 0.0722),
        }
    }
}

/// Where the chroma samples of one direction sit among those of luma.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chroma {
    Full,
    /// Half as many, each at an even luma sample.
    HalfCosited,
    /// Half as many, each between two luma samples.
    HalfCentred,
}

impl Chroma {
    pub fn count(self, luma: usize) -> usize {
        if self == Chroma::Full { luma } else { luma.div_ceil(2) }
    }

    /// For each luma sample: the chroma samples around it, and how much the second one counts.
    fn neighbours(self, luma: usize) -> Result<Vec<(usize, usize, f32)>> {
        let last = self.count(luma) - 1;
        let at = |i: usize| match self {
            Chroma::Full => i as f32,
            Chroma::HalfCosited => i as f32 / 2.0,
            Chroma::HalfCentred => ((i as f32 - 0.5) / 2.0).max(0.0),
        };
        let around = |position: f32| {
            let low = (position as usize).min(last);
            (low, (low + 1).min(last), position - low as f32)
        };
        memory::collected(luma, (0..luma).map(|i| around(at(i))), "a row")
    }

    /// For one chroma sample: the luma positions it averages, with weights that add up to 1.
    fn taps(self, chroma: usize, luma: usize) -> [(usize, f32); 3] {
        let clamp = |i: usize| i.min(luma - 1);
        match self {
            Chroma::Full => [(chroma, 1.0), (chroma, 0.0), (chroma, 0.0)],
            Chroma::HalfCosited => {
                [((2 * chroma).saturating_sub(1), 0.25), (2 * chroma, 0.5), (clamp(2 * chroma + 1), 0.25)]
            }
            Chroma::HalfCentred => [(2 * chroma, 0.5), (clamp(2 * chroma + 1), 0.5), (2 * chroma, 0.0)],
        }
    }
}

/// Everything about planes but their contents.
#[derive(Debug, Clone, Copy)]
pub struct Planes {
    pub width: usize,
    pub height: usize,
    pub horizontal: Chroma,
    pub vertical: Chroma,
    pub bits: u32,
    pub full_range: bool,
    pub matrix: Matrix,
}

impl Planes {
    pub fn chroma_size(&self) -> (usize, usize) {
        (self.horizontal.count(self.width), self.vertical.count(self.height))
    }

    /// Samples of luma and both chromas.
    pub fn samples(&self) -> usize {
        let (width, height) = self.chroma_size();
        self.width * self.height + 2 * width * height
    }

    /// Black and white of luma, and middle and half span of chroma, as sample values.
    fn levels(&self) -> [f32; 4] {
        let unit = (1u32 << (self.bits - 8)) as f32;
        let top = ((1u32 << self.bits) - 1) as f32;
        if self.full_range {
            [0.0, top, 128.0 * unit, top / 2.0]
        } else {
            [16.0 * unit, 235.0 * unit, 128.0 * unit, 112.0 * unit]
        }
    }

    /// Planes to RGB: calls `pixel` with red, green and blue in 0..1 for each pixel, in rows.
    pub fn unpack(self, samples: &[u16], mut pixel: impl FnMut([f32; 3])) -> Result<()> {
        let (luma, chroma) = samples.split_at(self.width * self.height);
        let (chroma_width, chroma_height) = self.chroma_size();
        let (blue, red) = chroma.split_at(chroma_width * chroma_height);
        let [black, white, middle, half] = self.levels();
        let (kr, kb) = self.matrix.weights();
        let columns = self.horizontal.neighbours(self.width)?;
        let line = || memory::collected(chroma_width, std::iter::repeat(0.0), "a row");
        let mut lines = [line()?, line()?];
        for (y, (top, bottom, down)) in self.vertical.neighbours(self.height)?.into_iter().enumerate() {
            for (line, plane) in lines.iter_mut().zip([blue, red]) {
                let (top, bottom) = (&plane[top * chroma_width..], &plane[bottom * chroma_width..]);
                for ((out, a), b) in line.iter_mut().zip(top).zip(bottom) {
                    *out = (f32::from(*a) * (1.0 - down) + f32::from(*b) * down - middle) / half;
                }
            }
            for (x, (left, right, along)) in columns.iter().enumerate() {
                let [cb, cr] = [0, 1].map(|i| lines[i][*left] * (1.0 - along) + lines[i][*right] * along);
                let luma = (f32::from(luma[y * self.width + x]) - black) / (white - black);
                let r = luma + (1.0 - kr) * cr;
                let b = luma + (1.0 - kb) * cb;
                let g = (luma - kr * r - kb * b) / (1.0 - kr - kb);
                pixel([r, g, b].map(|v| v.clamp(0.0, 1.0)));
            }
        }
        Ok(())
    }

    /// The opposite: `pixel` gives red, green and blue in 0..1 of the pixel with this index.
    pub fn pack(self, pixel: impl Fn(usize) -> [f32; 3], samples: &mut [u16]) -> Result<()> {
        let [black, white, middle, half] = self.levels();
        let (kr, kb) = self.matrix.weights();
        let top = ((1u32 << self.bits) - 1) as f32;
        let sample = |value: f32| value.round().clamp(0.0, top) as u16;
        let (luma, chroma) = samples.split_at_mut(self.width * self.height);
        let what = format_args!("chroma of {}x{}", self.width, self.height);
        let mut differences = memory::zeroed::<[f32; 2]>(self.width * self.height, what)?;
        for (i, (out, difference)) in luma.iter_mut().zip(&mut differences).enumerate() {
            let [r, g, b] = pixel(i);
            let y = kr * r + (1.0 - kr - kb) * g + kb * b;
            *out = sample(black + y * (white - black));
            *difference = [(b - y) / (1.0 - kb), (r - y) / (1.0 - kr)];
        }
        let (chroma_width, chroma_height) = self.chroma_size();
        for (plane, samples) in chroma.chunks_exact_mut(chroma_width * chroma_height).enumerate() {
            for (i, out) in samples.iter_mut().enumerate() {
                let (rows, columns) = (
                    self.vertical.taps(i / chroma_width, self.height),
                    self.horizontal.taps(i % chroma_width, self.width),
                );
                let row =
                    |y: usize| columns.iter().map(|(x, w)| w * differences[y * self.width + x][plane]).sum::<f32>();
                let value: f32 = rows.iter().filter(|(_, w)| *w > 0.0).map(|(y, w)| w * row(*y)).sum();
                *out = sample(middle + value * half);
            }
        }
        Ok(())
    }
}
