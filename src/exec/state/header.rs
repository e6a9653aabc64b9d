//! The header of a state: what it belongs to, its settings, its saved plan. Numbers are 64 bits, little-endian.

use super::sealed::SEAL;
use super::{SealedReader, refuse};
use crate::backend::Precision;
use crate::error::Result;
use crate::exec::check::MOST_FRAMES;
use crate::exec::settings::{Latent, PixelRange, Settings};
use crate::ir::{CacheFormat, Shape, TensorDevice};
use crate::model::Direction;
use crate::plan::{CachePolicy, SavedPlan, SchedulePolicy, Spacing, TileSize};

const MAGIC: [u8; 8] = *b"vvae\0st\x1a";
/// How a state is written. Raise it with any change to this header.
const FORMAT: u64 = 11;
/// What a saved plan persists, and the bits it gives. Raise it with either; releases that change neither share states.
/// `tests/stream_state_golden.rs` fails if the persisted regions change.
const REVISION: u64 = 1;
/// Stored in a state for error texts only.
const LIBRARY: &str = env!("CARGO_PKG_VERSION");
/// Magic, format and the length of what follows.
const PREAMBLE: u64 = 24;
/// A header has one number for each layer and little else.
const MOST_BYTES: u64 = 1 << 16;
/// Longer than any text of a header.
const MOST_LETTERS: usize = 40;

/// Values by their number in a state, which never changes.
const DIRECTIONS: [Direction; 2] = [Direction::Encode, Direction::Decode];
const PIXEL_RANGES: [PixelRange; 2] = [PixelRange::Signed, PixelRange::Unit];
const POSTERIORS: [Latent; 2] = [Latent::Mean, Latent::Sample];
const CACHES: [CachePolicy; 3 + CachePolicy::SHARES as usize] = {
    let mut caches = [CachePolicy::Resident; 3 + CachePolicy::SHARES as usize];
    caches[1] = CachePolicy::Recomputed;
    let mut resident_shares = 0;
    while resident_shares <= CachePolicy::SHARES {
        caches[2 + resident_shares as usize] = CachePolicy::Offloaded { resident_shares };
        resident_shares += 1;
    }
    caches
};
const SPACINGS: [Spacing; 2] = [Spacing::Strided, Spacing::Even];

/// What a state belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateOwner {
    /// "cpu" or "cuda".
    pub device: &'static str,
    pub precision: Precision,
    pub cache: CacheFormat,
}

impl StateOwner {
    pub fn new(place: TensorDevice, precision: Precision, cache: CacheFormat) -> StateOwner {
        let device = match place {
            TensorDevice::Cpu => "cpu",
            TensorDevice::Cuda(_) => "cuda",
        };
        StateOwner { device, precision, cache }
    }
}

/// The settings that change what comes out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Numbers {
    scaling_factor: f32,
    pixel_range: PixelRange,
    posterior: Latent,
    seed: u64,
}

impl Numbers {
    pub fn of(settings: &Settings) -> Numbers {
        let Settings { scaling_factor, pixel_range, posterior, seed, .. } = *settings;
        Numbers { scaling_factor, pixel_range, posterior, seed }
    }

    pub fn put_into(self, settings: Settings) -> Settings {
        let Numbers { scaling_factor, pixel_range, posterior, seed } = self;
        Settings { scaling_factor, pixel_range, posterior, seed, ..settings }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct StateHeader {
    /// The checkpoint's fingerprint.
    pub model: u64,
    pub direction: Direction,
    /// Of what goes in; without frames.
    pub input: Shape,
    pub numbers: Numbers,
    pub plan: SavedPlan,
    /// The first output frame, and the next input frame.
    pub first: u64,
    pub loaded: u64,
}

impl StateHeader {
    /// Bytes of a whole state whose frames take `frames` bytes.
    pub fn state_bytes(&self, owner: &StateOwner, frames: u64) -> u64 {
        self.write(owner).len() as u64 + SEAL + frames + SEAL
    }

    pub fn write(&self, owner: &StateOwner) -> Vec<u8> {
        let mut body = Writer(Vec::new());
        body.text(LIBRARY);
        body.number(REVISION);
        body.text(owner.device);
        body.text(owner.precision.name());
        body.text(owner.cache.name());
        body.number(self.model);
        body.number(index(&DIRECTIONS, self.direction));
        let Shape { batch, channels, frames: _, height, width } = self.input;
        [batch, channels, height, width].into_iter().for_each(|n| body.number(n));
        let Numbers { scaling_factor, pixel_range, posterior, seed } = self.numbers;
        body.number(u64::from(scaling_factor.to_bits()));
        body.number(index(&PIXEL_RANGES, pixel_range));
        body.number(index(&POSTERIORS, posterior));
        body.number(seed);
        let SavedPlan { policy, tiles } = &self.plan;
        // Streams offload no outputs.
        let SchedulePolicy {
            slice,
            chunks,
            materialised,
            materialised_hidden,
            caches,
            offloaded_outputs: _,
            offloaded_weights,
        } = policy;
        body.number(*slice);
        body.numbers(chunks.iter().copied());
        body.numbers(materialised.iter().copied());
        body.numbers(materialised_hidden.iter().copied());
        body.numbers(caches.iter().map(|cache| index(&CACHES, *cache)));
        body.numbers(offloaded_weights.iter().map(|offloaded| u64::from(*offloaded)));
        body.numbers(tiles.iter().flat_map(|tiles| {
            let TileSize { height, width, overlap, spacing } = *tiles;
            [height, width, overlap, index(&SPACINGS, spacing)]
        }));
        body.number(self.first);
        body.number(self.loaded);
        let preamble = [FORMAT, body.0.len() as u64].map(u64::to_le_bytes).concat();
        [&MAGIC[..], &preamble, &body.0].concat()
    }

    /// Reads a header and its checksum, and checks `owner`. The caller checks the model: its fingerprint takes a while.
    pub fn read(from: &mut SealedReader, owner: &StateOwner) -> Result<StateHeader> {
        let preamble = from.take(PREAMBLE)?;
        let mut numbers = Reader(&preamble[MAGIC.len()..]);
        if preamble[..MAGIC.len()] != MAGIC {
            return Err(refuse("is not what vvae_stream_save writes"));
        }
        let (format, bytes) = (numbers.number()?, numbers.number()?);
        if format != FORMAT {
            return Err(refuse(format_args!(
                "is of format {format}, but video-vae {LIBRARY} reads format {FORMAT}; continue with the version that \
                 saved it, or start the stream again"
            )));
        }
        if bytes > MOST_BYTES {
            return Err(refuse(format_args!("is damaged: its header claims {bytes} bytes")));
        }
        let body = from.take(bytes)?;
        from.check_seal()?;
        StateHeader::parse(&mut Reader(&body), owner)
    }

    fn parse(body: &mut Reader, owner: &StateOwner) -> Result<StateHeader> {
        let library = String::from_utf8_lossy(body.text()?);
        let revision = body.number()?;
        if revision != REVISION {
            return Err(refuse(format_args!(
                "was saved by video-vae {library}, whose streams differ (revision {revision}, and {REVISION} in \
                 {LIBRARY}); continue with that version, or start the stream again"
            )));
        }
        body.expect("device", owner.device, "create the handle on the same kind of device")?;
        body.expect("precision", owner.precision.name(), "set precision to that of the state")?;
        body.expect("cache", owner.cache.name(), "set cache to that of the state")?;
        let model = body.number()?;
        let direction = body.choice(DIRECTIONS)?;
        let [batch, channels, height, width] = [body.number()?, body.number()?, body.number()?, body.number()?];
        let numbers = Numbers {
            scaling_factor: body.factor()?,
            pixel_range: body.choice(PIXEL_RANGES)?,
            posterior: body.choice(POSTERIORS)?,
            seed: body.number()?,
        };
        let slice = body.number()?;
        let (chunks, materialised, materialised_hidden) = (body.numbers()?, body.numbers()?, body.numbers()?);
        let caches = body.list(|body| body.choice(CACHES))?;
        let offloaded_weights = body.list(|body| body.choice([false, true]))?;
        let tiles = match body.number()? {
            0 => None,
            4 => Some(TileSize {
                height: body.number()?,
                width: body.number()?,
                overlap: body.number()?,
                spacing: body.choice(SPACINGS)?,
            }),
            _ => return Err(nonsense()),
        };
        let (first, loaded) = (body.number()?, body.number()?);
        if first.max(loaded) > MOST_FRAMES || !body.0.is_empty() {
            return Err(nonsense());
        }
        let input = Shape::new(batch, channels, 0, height, width);
        let offloaded_outputs = vec![false; caches.len()];
        let policy = SchedulePolicy {
            slice,
            chunks,
            materialised,
            materialised_hidden,
            caches,
            offloaded_outputs,
            offloaded_weights,
        };
        Ok(StateHeader { model, direction, input, numbers, plan: SavedPlan { policy, tiles }, first, loaded })
    }
}

fn index<T: PartialEq>(values: &[T], value: T) -> u64 {
    values.iter().position(|known| *known == value).expect("every value has a number") as u64
}

fn nonsense() -> crate::error::Error {
    refuse("is damaged: its header contradicts itself")
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    fn numbers(&mut self, numbers: impl Iterator<Item = u64>) {
        let numbers: Vec<u64> = numbers.collect();
        self.number(numbers.len() as u64);
        numbers.into_iter().for_each(|n| self.number(n));
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend(text.as_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn number(&mut self) -> Result<u64> {
        let (number, rest) = self.0.split_first_chunk().ok_or_else(nonsense)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*number))
    }

    /// A value by its number.
    fn choice<T: Copy, const N: usize>(&mut self, values: [T; N]) -> Result<T> {
        let index = self.number()?;
        usize::try_from(index).ok().and_then(|i| values.get(i)).copied().ok_or_else(nonsense)
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Reader<'a>) -> Result<T>) -> Result<Vec<T>> {
        let count = self.number()?;
        // The count is not trusted: nothing is reserved, and the list ends with the header at the latest.
        (0..count).map(|_| item(self)).collect()
    }

    fn numbers(&mut self) -> Result<Vec<u64>> {
        self.list(Reader::number)
    }

    fn factor(&mut self) -> Result<f32> {
        let factor = u32::try_from(self.number()?).map(f32::from_bits).map_err(|_| nonsense())?;
        // The range of the parameter.
        if (1e-6..=1e6).contains(&factor) { Ok(factor) } else { Err(nonsense()) }
    }

    fn text(&mut self) -> Result<&'a [u8]> {
        let length = usize::try_from(self.number()?).ok().filter(|length| *length <= MOST_LETTERS);
        let (text, rest) = length.and_then(|length| self.0.split_at_checked(length)).ok_or_else(nonsense)?;
        self.0 = rest;
        Ok(text)
    }

    fn expect(&mut self, what: &str, expected: &str, hint: &str) -> Result<()> {
        let text = self.text()?;
        if text == expected.as_bytes() {
            return Ok(());
        }
        let found = String::from_utf8_lossy(text);
        Err(refuse(format_args!("its {what} is {found}, here it is {expected}; {hint}")))
    }
}

#[cfg(test)]
mod tests;
