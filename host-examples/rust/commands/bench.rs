//! `vvae bench`: how fast it is here.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

use super::Command;
use crate::api::{VVAE_DEVICE_CUDA, VVAE_OK, sized, vvae_device_desc};
use crate::args::{Args, Takes};
use crate::checkpoint::Config;
use crate::files::safetensors::Header;
use crate::gpu::{Gpu, Memory};
use crate::random_weights::{self, Random};
use crate::say::{self, say};
use crate::tensor::{Dtype, FrameKind, Frames};
use crate::{Result, cublas, options, units};

pub const COMMAND: Command = Command {
    name: "bench",
    summary: "seconds, frames/s, FLOP/s and memory",
    usage: "[OPTIONS]",
    about: "\
Measures whole calls from host memory to host memory: f32 latents and 8-bit interleaved RGB. Each case has a handle of its
own, one run to warm up, and is given as the median of the repeats. FLOP are counted on the network as published, with
nothing folded, so that they compare with other implementations; work that is saved shows as speed. The second rate counts
what is computed after folding; on a GPU it is also given as a part of the rate of a large matrix product (8192 x 8192, f16
with f32 sums) that cuBLAS reaches on the same card just before, if this machine has cuBLAS ($VVAE_CUBLAS may name it).
",
    help: &[
        "\
Options:
  --random            full-size random weights, made once in the temporary folder (half a gigabyte)
  --shapes LIST       FRAMESxHEIGHTxWIDTH of the video; default: 21x720x1280,1x1024x1024,5x512x512 on a GPU,
                      1x256x256,5x128x128 on the CPU
  --ops LIST          default: decode,encode
  --repeat N          default: 3
  --device-tensors    latents and video in the GPU's memory, used in place, instead of host memory
  --json FILE         also write the figures there
",
        options::MODEL_HELP,
    ],
    examples: "  vvae bench --random\n  \
               vvae bench --weights ema_vae_fp16.safetensors --device cuda:0 --shapes 21x1080x1920 --json bench.json\n  \
               vvae bench --random --device cuda:0 --device-tensors --shapes 5x512x512 --repeat 20\n  \
               vvae bench --random --device cpu --ops decode --set threads=1\n",
    takes: Takes {
        required: &[],
        optional: &[],
        valued: &[&["shapes", "ops", "repeat", "json"], options::MODEL],
        flags: &["random", "device-tensors"],
    },
    run,
};

struct Row {
    op: String,
    shape: String,
    seconds: f64,
    fps: f64,
    flops: f64,
    computed: f64,
    create: f64,
    first: f64,
    peak: u64,
    host: u64,
}

fn run(args: &Args) -> Result<()> {
    let weights = weights(args)?;
    let config = Config::of(&Header::read(&weights)?)
        .ok_or_else(|| format!("{} is no checkpoint of this model; name one", weights.display()))?;
    let repeat = args.parsed("repeat", 3usize, "3")?.max(1);
    let gpu = gpu_index(args)?;
    let on_cpu = gpu.is_none();
    if on_cpu && args.flag("device-tensors") {
        return Err("--device-tensors: the device is the CPU; name a GPU with --device cuda:0".into());
    }
    let usual = if on_cpu { "1x256x256,5x128x128" } else { "21x720x1280,1x1024x1024,5x512x512" };
    let (unit, scale) = if on_cpu { ("GFLOP/s", 1e9) } else { ("TFLOP/s", 1e12) };
    let place = if args.flag("device-tensors") { "device" } else { "host" };
    say!("{}, {} repeats, tensors in {place} memory", weights.display(), repeat)?;
    if let (Some(_), Ok(arch)) = (gpu, std::env::var("VVAE_ARCH")) {
        say!("kernels of compute capability {arch} (VVAE_ARCH)")?;
    }
    let product = gpu.ok_or_else(|| "it is measured on GPUs".to_owned()).and_then(cublas::rate);
    match &product {
        Ok(rate) => say!("matrix product: {:.0} TFLOP/s", rate / 1e12)?,
        Err(why) => say!("matrix product: - ({why})")?,
    }
    say!(
        "{:<7} {:>14} {:>10} {:>10} {unit:>9} {:>9} {:>10} {:>12} {:>12} {:>9} {:>9}",
        "op",
        "shape",
        "seconds",
        "frames/s",
        "computed",
        "of product",
        "peak memory",
        "of it host",
        "create s",
        "first s"
    )?;
    let fraction = |row: &Row| product.as_ref().ok().map(|rate| row.computed / rate);
    let mut rows = Vec::new();
    for shape in args.option("shapes").unwrap_or(usual).split(',') {
        for op in args.option("ops").unwrap_or("decode,encode").split(',') {
            let row = measure(args, &weights, &config, op, shape, repeat)?;
            say!(
                "{:<7} {:>14} {:>10.4} {:>10.2} {:>9.1} {:>9.1} {:>10} {:>12} {:>12} {:>9.3} {:>9.3}",
                row.op,
                row.shape,
                row.seconds,
                row.fps,
                row.flops / scale,
                row.computed / scale,
                fraction(&row).map_or("-".into(), |part| format!("{:.0} %", part * 100.0)),
                units::bytes(row.peak),
                units::bytes(row.host),
                row.create,
                row.first
            )?;
            rows.push(row);
        }
    }
    if let Some(path) = args.option("json") {
        let product = product.as_ref().ok().map(|rate| rate / 1e12);
        let rows: Vec<_> = rows.iter().map(|row| as_json(row, product, place)).collect();
        let draft = crate::draft::Draft::new(Path::new(path))?;
        let text = format!("{:#}\n", Value::from(rows));
        draft.create()?.write_all(text.as_bytes()).map_err(|why| format!("{path} cannot be written: {why}"))?;
        draft.finish()?;
    }
    Ok(())
}

fn as_json(row: &Row, product: Option<f64>, place: &str) -> Value {
    let computed = row.computed / 1e12;
    json!({
        "op": row.op, "shape": row.shape, "seconds": row.seconds, "fps": row.fps, "tflops": row.flops / 1e12,
        "computed_tflops": computed, "product_tflops": product, "of_product": product.map(|rate| computed / rate),
        "tensors": place,
        "peak_bytes": row.peak, "host_bytes": row.host, "create_seconds": row.create, "first_seconds": row.first,
    })
}

fn measure(args: &Args, weights: &Path, config: &Config, op: &str, shape: &str, repeat: usize) -> Result<Row> {
    let size = units::sizes(shape, "21x720x1280").map_err(|why| format!("--shapes: {why}"))?;
    let [frames, height, width] = size;
    let encoder = match op {
        "encode" => true,
        "decode" => false,
        other => return Err(format!("--ops: \"{other}\" is neither decode nor encode")),
    };
    let started = Instant::now();
    let vae = options::open_vae_with(args, weights)?;
    let create = started.elapsed().as_secs_f64();
    let (width, height) = (width as usize, height as usize);
    let mut video = Frames::new(FrameKind::pixels(Dtype::U8, width, height), frames);
    let kind = FrameKind::latent(Dtype::F32, vae.latent_size(width, height));
    let mut latent = Frames::new(kind, vae.latent_frames(frames));
    let mut random = Random(1);
    video.bytes_mut().fill_with(|| random.bits() as u8);
    for value in latent.bytes_mut().chunks_exact_mut(4) {
        value.copy_from_slice(&random.normal().to_le_bytes());
    }
    let index = gpu_index(args)?.filter(|_| args.flag("device-tensors"));
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
    let mut times = (0..repeat).map(|_| run()).collect::<Result<Vec<f64>>>()?;
    times.sort_by(f64::total_cmp);
    let seconds = (times[(repeat - 1) / 2] + times[repeat / 2]) / 2.0;
    let memory = vae.memory()?;
    Ok(Row {
        op: op.to_owned(),
        shape: shape.to_owned(),
        seconds,
        fps: frames as f64 / seconds,
        flops: config.flops(encoder, size) / seconds,
        computed: config.folded_flops(encoder, size) / seconds,
        create,
        first,
        peak: memory.peak,
        host: memory.host,
    })
}

fn weights(args: &Args) -> Result<PathBuf> {
    if !args.flag("random") {
        return options::weights(args).map_err(|_| {
            "there is no checkpoint to measure; pass --weights FILE, or --random for a made-up one".into()
        });
    }
    if args.option("weights").is_some() {
        return Err("--random and --weights are two checkpoints; leave one out".into());
    }
    // A whole file has this name, as it is given only when it is whole.
    let path = std::env::temp_dir().join("vvae-random-full-f16.safetensors");
    if !path.exists() {
        say::note(format_args!("making {}", path.display()));
        random_weights::write(&path, &Config::published(), Dtype::F16, 0)?;
    }
    Ok(path)
}

/// The GPU that was asked for, if one was; "auto" is the first of the list. What is no device at all, the library refuses.
fn gpu_index(args: &Args) -> Result<Option<i32>> {
    let api = crate::api::api()?;
    Ok(match args.option("device") {
        None | Some("auto") => {
            let mut first = sized::<vvae_device_desc>();
            // SAFETY: the struct is as long as it says.
            let status = unsafe { (api.vvae_device_info)(0, &mut first) };
            (status == VVAE_OK && first.device_type == VVAE_DEVICE_CUDA).then_some(first.device_id)
        }
        Some(name) => name.strip_prefix("cuda:").and_then(|index| index.parse().ok()),
    })
}
