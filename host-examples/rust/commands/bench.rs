//! `vvae bench`: how fast it is here.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::ValueEnum;
use serde_json::{Value, json};
use video_vae::internals::model::Model;
use video_vae::internals::model::families::FAMILIES;

use crate::api::{VVAE_DEVICE_CUDA, VVAE_OK, sized, vvae_device_desc};
use crate::gpu::{Gpu, Memory};
use crate::json::{Json, JsonOptions};
use crate::options::ModelOptions;
use crate::random_weights::{self, Random};
use crate::say::{self, say};
use crate::tensor::{Dtype, FrameKind, Frames};
use crate::vae::TRACE;
use crate::{Result, checkpoint, cublas, units};

const EXAMPLES: &str = "Examples:
  vvae bench --random
  vvae bench --weights ema_vae_fp16.safetensors --device cuda:0 --shapes 21x1080x1920 --json bench.json
  vvae bench --random --device cuda:0 --device-tensors --shapes 5x512x512 --repeat 20
  vvae bench --random --device cuda:0 --set autotune=on
  vvae bench --random flux --device cpu
  vvae bench --random --device cpu --ops decode --set threads=1
";

/// Seconds, frames/s, FLOP/s and memory.
///
/// Measures whole calls from host memory to host memory: f32 latents and 8-bit interleaved RGB. Each case has a handle
/// of its own, one run to warm up, and is given as the median of the repeats. FLOP are counted on the network as
/// published, with nothing folded, so that they compare with other implementations; work that is saved shows as speed.
/// The second rate counts the folded network; on a GPU it is also given as a part of the rate of a large matrix product
/// (8192 x 8192, f16 with f32 sums) that cuBLAS reaches on the same card just before, if this machine has cuBLAS
/// ($VVAE_CUBLAS may name it). Winograd's algorithm computes fewer products than are counted, so this part can exceed
/// 100 %. "estimated" is the plan's time as a part of the measured one. On the CPU every case is measured in fp32 and
/// in bf16, unless --set precision names one.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Bench {
    /// Full-size random weights of a published model, made once in the temporary folder (up to 1.5 GB); an unknown name
    /// lists the models.
    #[arg(long, conflicts_with = "weights", value_name = "MODEL", num_args = 0..=1, default_missing_value = "seedvr2")]
    random: Option<String>,
    /// FRAMESxHEIGHTxWIDTH of the video; default: 21x720x1280,1x1024x1024,5x512x512 on a GPU, 1x256x256,5x128x128 on
    /// the CPU; those of image models have one frame.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = size)]
    shapes: Vec<[u64; 3]>,
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "decode,encode")]
    ops: Vec<Op>,
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    repeat: u64,
    /// Latents and video in the GPU's memory, used in place, instead of host memory.
    #[arg(long)]
    device_tensors: bool,
    #[command(flatten)]
    json: JsonOptions,
    /// Compare with figures saved by --json; fails if a case takes more than 1.1 times as long.
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    #[command(flatten)]
    model: ModelOptions,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Op {
    Decode,
    Encode,
}

fn size(text: &str) -> Result<[u64; 3]> {
    units::sizes(text, "21x720x1280")
}

struct Row {
    op: &'static str,
    precision: &'static str,
    shape: String,
    seconds: f64,
    estimated: f64,
    fps: f64,
    flops: f64,
    computed: f64,
    create: f64,
    first: f64,
    peak: u64,
    host: u64,
}

impl Bench {
    pub fn run(self) -> Result<()> {
        // What cannot be read is said before minutes are spent.
        let saved = self.against.as_deref().map(saved_rows).transpose()?;
        let json = self.json.open()?;
        let weights = self.weights()?;
        let model = checkpoint::model(&weights)?;
        let gpu = gpu_index(&self.model.device)?;
        if gpu.is_none() && self.device_tensors {
            return Err("--device-tensors: the device is the CPU; name a GPU with --device cuda:0".into());
        }
        let repeats = units::counted(self.repeat, "repeat");
        say!("{}, {repeats}, tensors in {} memory", weights.display(), self.place())?;
        if let (Some(_), Ok(arch)) = (gpu, std::env::var("VVAE_ARCH")) {
            say!("kernels of compute capability {arch} (VVAE_ARCH)")?;
        }
        let product = gpu.ok_or_else(|| "it is measured on GPUs".to_owned()).and_then(cublas::rate);
        match &product {
            Ok(rate) => say!("matrix product: {:.0} TFLOP/s", rate / 1e12)?,
            Err(why) => say!("matrix product: - ({why})")?,
        }
        let product = product.ok();
        heading(if gpu.is_some() { "TFLOP/s" } else { "GFLOP/s" })?;
        let usual: &[[u64; 3]] = match gpu {
            _ if model.geometry.time == 1 && gpu.is_some() => &[[1, 1024, 1024], [1, 2048, 2048]],
            _ if model.geometry.time == 1 => &[[1, 256, 256]],
            Some(_) => &[[21, 720, 1280], [1, 1024, 1024], [5, 512, 512]],
            None => &[[1, 256, 256], [5, 128, 128]],
        };
        let shapes = if self.shapes.is_empty() { usual } else { &self.shapes };
        let mut rows = Vec::new();
        let precisions = self.model.precisions(gpu.is_none() && !self.model.device.starts_with("cuda"));
        if self.model.setting(TRACE).is_some() && shapes.len() * self.ops.len() * precisions.len() > 1 {
            return Err("--trace: every case would write it; name one with --shapes, --ops and --set precision".into());
        }
        for (shape, op) in shapes.iter().flat_map(|shape| self.ops.iter().map(move |op| (*shape, *op))) {
            for precision in precisions {
                let row = self.measure((&weights, *precision), &model, op, shape, gpu)?;
                line(&row, if gpu.is_some() { 1e12 } else { 1e9 }, product)?;
                rows.push(as_json(&row, product.map(|rate| rate / 1e12), self.place()));
            }
        }
        json.write("bench", rows.clone())?;
        saved.map_or(Ok(()), |saved| compare(&rows, &saved))
    }

    fn place(&self) -> &'static str {
        if self.device_tensors { "device" } else { "host" }
    }

    fn weights(&self) -> Result<PathBuf> {
        let Some(name) = &self.random else {
            return self.model.weights().map_err(|why| format!("{why}; --random makes one of the real size"));
        };
        let published = || FAMILIES.iter().flat_map(|family| family.published);
        let Some(found) = published().find(|known| known.name == name) else {
            let names: Vec<&str> = published().map(|known| known.name).collect();
            return Err(format!("--random: no model is called {name:?}; give one of {}", names.join(", ")));
        };
        // A whole file has this name, as it is given only when it is whole.
        let path = std::env::temp_dir().join(format!("vvae-random-{name}-f16.safetensors"));
        if !path.exists() {
            say::note(format_args!("making {}", path.display()));
            random_weights::write(&path, &(found.model)(), Dtype::F16, 0)?;
        }
        Ok(path)
    }

    fn measure(
        &self,
        (weights, precision): (&Path, Option<&'static str>),
        model: &Model,
        op: Op,
        size: [u64; 3],
        gpu: Option<i32>,
    ) -> Result<Row> {
        let [frames, height, width] = size;
        let encoder = op == Op::Encode;
        let started = Instant::now();
        let vae = self.model.open(weights)?;
        precision.map_or(Ok(()), |precision| vae.configure("precision", precision))?;
        let create = started.elapsed().as_secs_f64();
        let (width, height) = (width as usize, height as usize);
        let channels = if encoder { vae.model().pixel_channels } else { vae.model().decoded_channels } as usize;
        let mut video = Frames::new(FrameKind::pixels(Dtype::U8, width, height).with_channels(channels), frames)?;
        let kind = FrameKind::latent(Dtype::F32, vae.latent_size(width, height));
        let mut latent = Frames::new(kind, vae.latent_frames(frames))?;
        let mut random = Random(1);
        video.bytes_mut().fill_with(|| random.bits() as u8);
        for value in latent.bytes_mut().chunks_exact_mut(4) {
            value.copy_from_slice(&random.normal().to_le_bytes());
        }
        let index = gpu.filter(|_| self.device_tensors);
        let gpu = index.map(Gpu::open).transpose()?;
        let on_device = |frames: &Frames| -> Result<_> {
            let memory = gpu.as_ref().map(|gpu| gpu.memory(frames.bytes().len())).transpose()?;
            memory.as_ref().map_or(Ok(()), |memory| memory.write(frames.bytes()))?;
            Ok(memory)
        };
        let (video_memory, latent_memory) = (on_device(&video)?, on_device(&latent)?);
        let mut run = || {
            let there = |frames: &mut Frames, memory: &Option<Memory>| match memory {
                Some(memory) => frames.tensor_on(index.unwrap_or(0), memory.address),
                None => frames.tensor_mut(),
            };
            let (pixels, latents) = (there(&mut video, &video_memory), there(&mut latent, &latent_memory));
            let (input, output) = if encoder { (pixels, latents) } else { (latents, pixels) };
            let started = Instant::now();
            // SAFETY: the frames and their copies on the device live until the end, and nobody else uses them.
            unsafe { vae.run(encoder, &input, &output) }.map(|()| started.elapsed().as_secs_f64())
        };
        let first = run()?;
        let mut times = (0..self.repeat).map(|_| run()).collect::<Result<Vec<f64>>>()?;
        times.sort_by(f64::total_cmp);
        let seconds = (times[(times.len() - 1) / 2] + times[times.len() / 2]) / 2.0;
        vae.end_trace()?;
        let memory = vae.memory()?;
        Ok(Row {
            op: if encoder { "encode" } else { "decode" },
            precision: precision.unwrap_or("as set"),
            shape: size.map(|n| n.to_string()).join("x"),
            seconds,
            estimated: vae.last_run()?.estimated_seconds,
            fps: frames as f64 / seconds,
            flops: checkpoint::flops(model, encoder, size)? / seconds,
            computed: checkpoint::folded_flops(model, encoder, size)? / seconds,
            create,
            first,
            peak: memory.peak,
            host: memory.host,
        })
    }
}

fn heading(unit: &str) -> Result<()> {
    say!(
        "{:<7} {:<9} {:>14} {:>10} {:>9} {:>10} {unit:>9} {:>9} {:>10} {:>12} {:>12} {:>9} {:>9}",
        "op",
        "precision",
        "shape",
        "seconds",
        "estimated",
        "frames/s",
        "computed",
        "of product",
        "peak memory",
        "of it host",
        "create s",
        "first s"
    )
}

/// `scale`: of the heading's unit.
fn line(row: &Row, scale: f64, product: Option<f64>) -> Result<()> {
    say!(
        "{:<7} {:<9} {:>14} {:>10.4} {:>9} {:>10.2} {:>9.1} {:>9.1} {:>10} {:>12} {:>12} {:>9.3} {:>9.3}",
        row.op,
        row.precision,
        row.shape,
        row.seconds,
        format!("{:.0} %", row.estimated / row.seconds * 100.0),
        row.fps,
        row.flops / scale,
        row.computed / scale,
        product.map_or("-".into(), |rate| format!("{:.0} %", row.computed / rate * 100.0)),
        units::bytes(row.peak),
        units::bytes(row.host),
        row.create,
        row.first
    )
}

fn as_json(row: &Row, product: Option<f64>, place: &str) -> Value {
    let computed = row.computed / 1e12;
    json!({
        "op": row.op, "precision": row.precision, "shape": row.shape, "seconds": row.seconds,
        "estimated_seconds": row.estimated, "fps": row.fps, "tflops": row.flops / 1e12,
        "computed_tflops": computed, "product_tflops": product, "of_product": product.map(|rate| computed / rate),
        "tensors": place,
        "peak_bytes": row.peak, "host_bytes": row.host, "create_seconds": row.create, "first_seconds": row.first,
    })
}

fn saved_rows(path: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read(path).map_err(|why| format!("--against: {} cannot be read: {why}", path.display()))?;
    Json::read(&text, "bench")
        .map_err(|why| format!("--against: {} is not what `vvae bench --json` writes: {why}", path.display()))
}

/// Measurements of one machine differ by less.
const TOLERANCE: f64 = 1.1;

/// The new figures beside the saved ones of the same cases. Fails if one of them has become slower.
fn compare(rows: &[Value], saved: &[Value]) -> Result<()> {
    let case =
        |row: &Value| ["op", "precision", "shape", "tensors"].map(|key| row[key].as_str().unwrap_or("?").to_owned());
    let (mut slower, mut compared) = (Vec::new(), 0);
    for row in rows {
        let case_words = case(row);
        let old = saved.iter().find(|old| case(old) == case_words).and_then(|old| old["seconds"].as_f64());
        let (Some(new), Some(old)) = (row["seconds"].as_f64(), old) else {
            say!("{}: not in the saved file", case_words[..3].join(" "))?;
            continue;
        };
        compared += 1;
        let words = format!("{}: {new:.4} s, before {old:.4} s, ratio {:.3}", case_words[..3].join(" "), new / old);
        say!("{words}")?;
        if new > old * TOLERANCE {
            slower.push(words);
        }
    }
    if compared == 0 {
        return Err(
            "--against: the saved file has none of these cases; save it with the same --shapes and --ops".into()
        );
    }
    if slower.is_empty() { Ok(()) } else { Err(format!("slower than before by more than 10 %: {}", slower.join("; "))) }
}

/// The GPU that was asked for, if one was; "auto" is the first of the list. What is no device at all, the library
/// refuses.
fn gpu_index(device: &str) -> Result<Option<i32>> {
    let api = crate::api::api()?;
    Ok(match device {
        "auto" => {
            let mut first = sized::<vvae_device_desc>();
            // SAFETY: the struct is as long as it says.
            let status = unsafe { (api.vvae_device_info)(0, &mut first) };
            (status == VVAE_OK && first.device_type == VVAE_DEVICE_CUDA).then_some(first.device_id)
        }
        name => name.strip_prefix("cuda:").and_then(|index| index.parse().ok()),
    })
}
