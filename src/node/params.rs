//! The table of parameters: key, kind, default, help, and the setting each one sets.

use std::ffi::CStr;
use std::path::PathBuf;

use crate::backend::cpu::Instructions;
use crate::backend::{AbsentDevice, Precision};
use crate::exec::{Latent, Latents, Limit, OnNonFinite, PixelRange, Settings};
use crate::ir::{CacheFormat, GivenRates};
use crate::model::Direction;
use crate::model::families::SCALED_NAMES;
use crate::report::Trace;

/// The values of a parameter.
#[derive(Debug, Clone, Copy)]
pub enum ParamKind {
    /// `auto`: "auto" is accepted, and 0 means the same.
    Int {
        auto: bool,
        min: u64,
        max: u64,
        step: u64,
    },
    Float {
        min: f64,
        max: f64,
        step: f64,
    },
    Bool,
    /// One of these words.
    Choice(&'static [&'static CStr]),
    /// A number of bytes, with or without a unit, a percentage of free memory, or "auto".
    Bytes {
        min: u64,
        max: u64,
        step: u64,
        /// Whether a list is accepted, one for each device.
        list: bool,
    },
    /// The name of a file; empty for none.
    Path,
    /// Some of the device's rates by their names, or "auto".
    Rates {
        min: f64,
        max: f64,
    },
}

/// An accepted value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Auto,
    Int(u64),
    Float(f32),
    Bool(bool),
    /// The index into the choices.
    Choice(usize),
    Percent(u64),
    Rates(GivenRates),
    Path(PathBuf),
    /// As many as in the text.
    List(Vec<Value>),
}

impl Value {
    fn limits(self) -> Vec<Limit> {
        if let Value::List(values) = self { values.into_iter().map(Value::limit).collect() } else { vec![self.limit()] }
    }

    fn limit(self) -> Limit {
        match self {
            Value::Percent(percent) => Limit::Percent(percent),
            value => value.number().map_or(Limit::Auto, Limit::Bytes),
        }
    }

    /// `None` for "auto".
    fn number(self) -> Option<u64> {
        if let Value::Int(n) = self { Some(n) } else { None }
    }

    fn int(self) -> u64 {
        self.number().expect("the kind makes it an integer")
    }

    fn float(self) -> f32 {
        if let Value::Float(x) = self { x } else { unreachable!("the kind makes it a float") }
    }

    fn bool(self) -> bool {
        self == Value::Bool(true)
    }

    fn path(self) -> Option<PathBuf> {
        if let Value::Path(path) = self { Some(path).filter(|path| !path.as_os_str().is_empty()) } else { None }
    }

    fn rates(self) -> GivenRates {
        if let Value::Rates(given) = self { given } else { GivenRates::default() }
    }

    fn choice<T: Copy, const N: usize>(self, meanings: [T; N]) -> T {
        if let Value::Choice(i) = self { meanings[i] } else { unreachable!("the kind makes it a choice") }
    }
}

/// One parameter of one or both nodes.
pub struct Param {
    pub key: &'static CStr,
    pub kind: ParamKind,
    /// An accepted text.
    pub default: &'static CStr,
    /// The unit of a number, or empty.
    pub unit: &'static CStr,
    pub help: &'static CStr,
    /// The one node it belongs to; `None`: both.
    pub only: Option<Direction>,
    pub(super) set: fn(&mut Settings, Value),
}

impl Param {
    pub fn key(&self) -> &'static str {
        super::ports::utf8(self.key)
    }

    pub fn default(&self) -> &'static str {
        super::ports::utf8(self.default)
    }

    pub fn applies_to(&self, direction: Direction) -> bool {
        self.only.is_none_or(|only| only == direction)
    }

    pub fn choices(&self) -> &'static [&'static CStr] {
        if let ParamKind::Choice(choices) = self.kind { choices } else { &[] }
    }
}

const FRAMES: ParamKind = ParamKind::Int { auto: true, min: 1, max: 4096, step: 1 };
const TILE_SIZE: ParamKind = ParamKind::Int { auto: false, min: 64, max: 1 << 20, step: 32 };
const TILE_OVERLAP: ParamKind = ParamKind::Int { auto: false, min: 0, max: 1 << 20, step: 8 };

/// The models whose latents have a name of their own where tensors do not tell them apart.
const LATENT_FORMATS: [&CStr; SCALED_NAMES.len() + 1] = {
    let mut words = [c"auto"; SCALED_NAMES.len() + 1];
    words.split_at_mut(1).1.copy_from_slice(&SCALED_NAMES);
    words
};

pub static PARAMS: &[Param] = &[
    Param {
        key: c"memory_limit",
        kind: ParamKind::Bytes { min: 1, max: u64::MAX, step: 1 << 20, list: true },
        default: c"auto",
        unit: c"bytes",
        help: c"The most memory a job may take, weights included. To keep to it, slices and chunks shrink; on a GPU caches, frames and weights are offloaded to host memory; tiles are the last resort. Of several devices, each may take this much; or a list has a value for each. A percentage is of free memory; entries on one device share it.",
        only: None,
        set: |s, v| s.memory_limit = v.limits(),
    },
    Param {
        key: c"host_memory_limit",
        kind: ParamKind::Bytes { min: 0, max: u64::MAX, step: 1 << 20, list: false },
        default: c"auto",
        unit: c"bytes",
        help: c"The most pinned host memory a job on a GPU may take. If memory_limit is tight, caches, frames and weights are offloaded there. Several devices share it, and so do frames that their streams keep.",
        only: None,
        set: |s, v| s.host_memory_limit = v.limit(),
    },
    Param {
        key: c"mixed_devices",
        kind: ParamKind::Choice(&[c"refuse", c"allow"]),
        default: c"refuse",
        unit: c"",
        help: c"Several devices give the bits of one if they have one architecture, precision and instruction set. If not, refuse fails; allow uses them, and bits depend on which device computes a frame.",
        only: None,
        set: |s, v| s.mixed_devices = v.choice([false, true]),
    },
    Param {
        key: c"tiles",
        kind: ParamKind::Choice(&[c"auto", c"never"]),
        default: c"auto",
        unit: c"",
        help: c"If the whole image does not fit in memory_limit, auto computes it in tiles, which are close but never exact; never fails instead.",
        only: None,
        set: |s, v| s.allow_tiles = v.choice([true, false]),
    },
    Param {
        key: c"threads",
        kind: ParamKind::Int { auto: true, min: 1, max: 1024, step: 1 },
        default: c"auto",
        unit: c"threads",
        help: c"Threads that compute, load and plan on the CPU; auto takes all cores. Entries of a device list that are the CPU share them. Results do not depend on it.",
        only: None,
        set: |s, v| s.threads = v.number(),
    },
    Param {
        key: c"instruction_set",
        kind: ParamKind::Choice(&[c"auto", c"avx512", c"avx2", c"portable", c"avx512bf16", c"amx", c"neon", c"neon_bf16"]),
        default: c"auto",
        unit: c"",
        help: c"Instructions of the CPU; auto takes the fastest it has for the precision. avx512bf16, amx and neon_bf16 compute in bf16 only. amx, which auto takes for bf16, is permitted by Linux to the whole process, which then refuses small signal stacks; avx512bf16 does without.",
        only: None,
        set: |s, v| {
            use Instructions::{Amx, Auto, Avx2, Avx512, Avx512Bf16, Neon, NeonBf16, Portable};
            s.instructions = v.choice([Auto, Avx512, Avx2, Portable, Avx512Bf16, Amx, Neon, NeonBf16]);
        },
    },
    Param {
        key: c"precision",
        kind: ParamKind::Choice(&[c"auto", c"fp16", c"bf16", c"fp32"]),
        default: c"auto",
        unit: c"",
        help: c"Precision of weights and activations; auto is fp16 on a GPU and fp32 on the CPU, which also has bf16. A call that overflows in auto's fp16 is repeated in bf16, and the handle stays with that. Sums are always fp32. On a CPU with AMX bf16 is several times as fast as fp32. On a GPU fp32 takes twice the memory and several times as long.",
        only: None,
        set: |s, v| {
            use Precision::{Bf16, Fp16, Fp32};
            s.precision = v.choice([None, Some(Fp16), Some(Bf16), Some(Fp32)]);
        },
    },
    Param {
        key: c"cache",
        kind: ParamKind::Choice(&[c"exact", c"u8"]),
        default: c"exact",
        unit: c"",
        help: c"How the causal caches of a clip are stored on a GPU. u8 rounds them to 8 bits, which halves their memory and what is moved of them within a memory_limit. The loss is about three times that of fp16; stills lose nothing. Results do not depend on slices, chunks or limits. The CPU has exact only.",
        only: None,
        set: |s, v| s.cache = v.choice([CacheFormat::Exact, CacheFormat::U8]),
    },
    Param {
        key: c"pixel_range",
        kind: ParamKind::Choice(&[c"-1..1", c"0..1"]),
        default: c"-1..1",
        unit: c"",
        help: c"The range of floating-point pixels. Pixels in u8 and u16 always use the full range of their type.",
        only: None,
        set: |s, v| s.pixel_range = v.choice([PixelRange::Signed, PixelRange::Unit]),
    },
    Param {
        key: c"scaling_factor",
        kind: ParamKind::Float { min: 1e-6, max: 1e6, step: 0.0001 },
        default: c"1.0",
        unit: c"",
        help: c"Multiplies the output of encode and divides the input of decode. 1 leaves latents as the network gives them. With latents=model it must be 1.",
        only: None,
        set: |s, v| s.scaling_factor = v.float(),
    },
    Param {
        key: c"latents",
        kind: ParamKind::Choice(&[c"raw", c"model"]),
        default: c"raw",
        unit: c"",
        help: c"Which latents encode writes and decode reads. raw: the mean as the network gives it. model: scaled, shifted and packed as the diffusion model reads and writes it; those of FLUX.2 have 4 times the channels at half the height and width. logvar is never scaled.",
        only: None,
        set: |s, v| s.latents = v.choice([Latents::Raw, Latents::Model]),
    },
    Param {
        key: c"latent_format",
        kind: ParamKind::Choice(&LATENT_FORMATS),
        default: c"auto",
        unit: c"",
        help: c"For latents=model, where the tensors fit several models: SD and SDXL have the same, and so have SD3 and FLUX.1. auto takes what the checkpoint says, if it has the diffusion model too, or a config.json beside it, as diffusers writes it.",
        only: None,
        set: |s, v| {
            let formats = LATENT_FORMATS.map(super::ports::utf8);
            s.latent_format = v.choice(formats.map(|name| Some(name).filter(|name| *name != "auto")));
        },
    },
    Param {
        key: c"posterior",
        kind: ParamKind::Choice(&[c"mean", c"sample"]),
        default: c"mean",
        unit: c"",
        help: c"The output of encode: the mean of the distribution, or a sample drawn with the seed.",
        only: Some(Direction::Encode),
        set: |s, v| s.posterior = v.choice([Latent::Mean, Latent::Sample]),
    },
    Param {
        key: c"seed",
        kind: ParamKind::Int { auto: false, min: 0, max: u64::MAX, step: 1 },
        default: c"42",
        unit: c"",
        help: c"Seed of posterior=sample. The same seed gives the same latents on every device.",
        only: Some(Direction::Encode),
        set: |s, v| s.seed = v.int(),
    },
    Param {
        key: c"encode_tiled",
        kind: ParamKind::Bool,
        default: c"false",
        unit: c"",
        help: c"Encode in tiles even if the whole image fits. Tiles are never exact.",
        only: Some(Direction::Encode),
        set: |s, v| s.tiling[Direction::Encode as usize].enabled = v.bool(),
    },
    Param {
        key: c"encode_tile_size",
        kind: TILE_SIZE,
        default: c"1024",
        unit: c"pixels",
        help: c"Height and width of a tile of encode_tiled.",
        only: Some(Direction::Encode),
        set: |s, v| s.tiling[Direction::Encode as usize].size = v.int(),
    },
    Param {
        key: c"encode_tile_overlap",
        kind: TILE_OVERLAP,
        default: c"128",
        unit: c"pixels",
        help: c"Overlap of neighbouring tiles, which fade into each other there; less than encode_tile_size.",
        only: Some(Direction::Encode),
        set: |s, v| s.tiling[Direction::Encode as usize].overlap = v.int(),
    },
    Param {
        key: c"decode_tiled",
        kind: ParamKind::Bool,
        default: c"false",
        unit: c"",
        help: c"Decode in tiles even if the whole image fits. Tiles are never exact.",
        only: Some(Direction::Decode),
        set: |s, v| s.tiling[Direction::Decode as usize].enabled = v.bool(),
    },
    Param {
        key: c"decode_tile_size",
        kind: TILE_SIZE,
        default: c"1024",
        unit: c"pixels",
        help: c"Height and width of a tile of decode_tiled.",
        only: Some(Direction::Decode),
        set: |s, v| s.tiling[Direction::Decode as usize].size = v.int(),
    },
    Param {
        key: c"decode_tile_overlap",
        kind: TILE_OVERLAP,
        default: c"128",
        unit: c"pixels",
        help: c"Overlap of neighbouring tiles, which fade into each other there; less than decode_tile_size.",
        only: Some(Direction::Decode),
        set: |s, v| s.tiling[Direction::Decode as usize].overlap = v.int(),
    },
    Param {
        key: c"slice_frames",
        kind: FRAMES,
        default: c"auto",
        unit: c"latent frames",
        help: c"Latent frames in a slice, which goes through the network at a time; auto plans it. A slice has 6 at most: for more, 6 are taken, and the log says so. Results do not depend on it.",
        only: None,
        set: |s, v| s.slice_frames = v.number(),
    },
    Param {
        key: c"chunk_frames",
        kind: FRAMES,
        default: c"auto",
        unit: c"frames",
        help: c"The most frames in a chunk, which a stage computes at a time; auto plans it. Results do not depend on it.",
        only: None,
        set: |s, v| s.chunk_frames = v.number(),
    },
    Param {
        key: c"nonfinite",
        kind: ParamKind::Choice(&[c"propagate", c"error"]),
        default: c"propagate",
        unit: c"",
        help: c"Input values that are NaN or infinite: propagate computes with them and logs a warning; exactly the output frames that depend on them become NaN, or 0 in u8 and u16. error does the same and then fails, so the output has been written; a call on a CUDA stream of the host's then waits for its work. The same holds for values that overflow on the way.",
        only: None,
        set: |s, v| s.on_nonfinite = v.choice([OnNonFinite::Propagate, OnNonFinite::Fail]),
    },
    Param {
        key: c"device_like",
        kind: ParamKind::Choice(&[c"none", c"rtx3060", c"rtx4070", c"rtx4090", c"rtx5090", c"a100", c"h200"]),
        default: c"none",
        unit: c"",
        help: c"A card that need not be here: vvae_plan and vvae_plan_timeline answer for it, by its published rates. Its times are estimates, and say so; of these cards only the h200 was ever measured. memory_limit is of its memory, host_memory_limit of this machine's. While it is set, runs and streams fail.",
        only: None,
        set: |s, v| {
            let [rtx3060, rtx4070, rtx4090, rtx5090, a100, h200] = AbsentDevice::KEYS.map(Some);
            s.device_like = v.choice([None, rtx3060, rtx4070, rtx4090, rtx5090, a100, h200]);
        },
    },
    Param {
        key: c"rates",
        kind: ParamKind::Rates { min: 1e6, max: 1e18 },
        default: c"auto",
        unit: c"",
        help: c"Rates per second that plans are compared by: products (multiplications), memory (bytes of device memory), copies (bytes from host memory while as many go to it). auto takes them from the device; copies of a GPU are measured once per process, or come from autotune's table. The text of a plan ends with its rates. With autotune=off, the same rates and limits give the same plan in every process. Results do not depend on it.",
        only: None,
        set: |s, v| s.rates = v.rates(),
    },
    Param {
        key: c"autotune",
        kind: ParamKind::Choice(&[c"off", c"on"]),
        default: c"off",
        unit: c"",
        help: c"on: the rates of a GPU are measured, not derived from its properties. The first plan takes about 2 s more for it, and up to 500 MB of device memory outside memory_limit; other work on the card would lower what is measured. The table at autotune_path keeps the rates of each card, CUDA version of its driver, and precision for later handles and processes. The log of the next run says what was measured or read. The CPU measures nothing. The key rates still wins. Results do not depend on it.",
        only: None,
        set: |s, v| s.autotune = v.choice([false, true]),
    },
    Param {
        key: c"autotune_path",
        kind: ParamKind::Path,
        default: c"",
        unit: c"",
        help: c"The file of autotune's table. Nothing: video-vae/rates.json in CUDA_CACHE_PATH if that is set, else in ~/.nv, or %APPDATA%\\NVIDIA on Windows. A table of another version counts as empty. A file that is no table is left as it is, with a warning. To measure again, remove the table. Read and written with autotune=on only.",
        only: None,
        set: |s, v| s.autotune_path = v.path(),
    },
    Param {
        key: c"trace",
        kind: ParamKind::Path,
        default: c"",
        unit: c"",
        help: c"A file for the times of every operation and copy, in the Chrome trace event format: chrome://tracing and Perfetto read it. It has everything from this call on and gets its name when trace is set again, to another path or to nothing, or when the handle is freed. Runs take a little longer, and a call on a CUDA stream of the host's waits. Results do not depend on it.",
        only: None,
        set: |s, v| s.trace = v.path().map(Trace::new),
    },
];
