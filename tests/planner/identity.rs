//! No plan changes a bit of the result: whole, sliced, chunked, streamed, on any number of threads, and under any limit
//! that needs no tiles.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Mutex;

use crate::common::safetensors::{Folder, to_bytes};
use crate::common::weights::{Sizes, random_weights};
use crate::common::{Buffer, Random, Stream, Vae, create_info, demo, on_every_device, run_info, small, video_models};
use video_vae::capi::*;

/// One direction of the network with a clip to run.
struct Work {
    node: &'static str,
    input: Buffer,
    output: [i64; 5],
}

impl Work {
    fn random(random: &mut Random, node: &'static str, input: [i64; 5], output: [i64; 5]) -> Work {
        Work { node, input: Buffer::random(random, input), output }
    }
}

fn works(vae: &Vae) -> Vec<Work> {
    let mut random = Random(11);
    let mut work = |node, input, output| Work::random(&mut random, node, vae.fitted(input), vae.fitted(output));
    vec![
        work("encode", [1, 3, 29, 24, 40], [1, 16, 8, 3, 5]),
        // 18 frames, padded to 21 by repeating the last.
        work("encode", [2, 3, 18, 24, 16], [2, 16, 6, 3, 2]),
        work("decode", [1, 16, 9, 3, 5], [1, 3, 33, 24, 40]),
        work("decode", [2, 16, 5, 2, 3], [2, 3, 17, 16, 24]),
        work("decode", [3, 16, 1, 5, 4], [3, 3, 1, 40, 32]),
    ]
}

/// For tests of offloading. The CPU's memory is the host's, so it offloads nothing.
fn on_every_gpu(test: impl Fn(&str)) {
    on_every_device(|device| {
        if device != "cpu" {
            test(device);
        }
    });
}

/// Plans depend on the memory that kernels take. Those of these jobs for Vulkan fetch no weights of some models, and
/// rematerialise no hidden frames to encode.
fn has_plans_of_cuda(device: &str) -> bool {
    device.starts_with("cuda")
}

fn run(vae: &Vae, work: &Work) -> Vec<u8> {
    let output = Buffer::poisoned(work.output);
    vae.run(work.node, &work.input.tensor(), &output.tensor(), &run_info()).unwrap();
    output.bytes().to_vec()
}

/// Frames `first..first + count` of a compact tensor, in the same memory.
struct Part {
    shape: [i64; 5],
    strides: [i64; 5],
    whole: vvae_tensor,
    first: i64,
}

impl Part {
    fn new(buffer: &Buffer, first: i64, count: i64) -> Part {
        let [b, c, t, h, w] = buffer.shape;
        let strides = [c * t * h * w, t * h * w, h * w, w, 1];
        Part { shape: [b, c, count, h, w], strides, whole: buffer.tensor(), first }
    }

    fn tensor(&self) -> vvae_tensor {
        let byte_offset = (self.first * self.strides[2] * 4) as u64;
        vvae_tensor { shape: self.shape.as_ptr(), strides: self.strides.as_ptr(), byte_offset, ..self.whole }
    }
}

/// Pushes up to `push` frames at a time and pulls up to `pull`, as the header's drain loop does.
fn run_stream(stream: &Stream, work: &Work, push: i64, pull: i64) -> Vec<u8> {
    let output = Buffer::poisoned(work.output);
    let (mut pushed, mut pulled) = (0, 0);
    loop {
        let count = push.min(work.input.shape[2] - pushed);
        if count > 0 {
            let (status, taken) = stream.push(Some(&Part::new(&work.input, pushed, count).tensor())).unwrap();
            assert_eq!(status == VVAE_AGAIN, taken < count);
            pushed += taken;
        } else {
            stream.push(None).unwrap();
        }
        loop {
            // After the last frame, room for one more, to catch a stream that writes too many.
            let left = (work.output[2] - pulled).max(0);
            let spare = Buffer::poisoned([work.output[0], work.output[1], 1, work.output[3], work.output[4]]);
            let part = if left > 0 { Part::new(&output, pulled, pull.min(left)) } else { Part::new(&spare, 0, 1) };
            let (status, written) = stream.pull(&part.tensor(), None).unwrap();
            assert!(left > 0 || written == 0, "the stream wrote too many frames");
            pulled += written;
            match status {
                VVAE_OK => assert!(written > 0),
                VVAE_AGAIN => break,
                VVAE_END => {
                    assert_eq!((pulled, pushed), (work.output[2], work.input.shape[2]));
                    return output.bytes().to_vec();
                }
                other => panic!("status {other}"),
            }
        }
    }
}

/// Runs a test on every device. The CPU has two precisions, a GPU two formats of caches.
fn on_every_device_and_precision(test: impl Fn(&str, &Vae)) {
    on_every_device(|device| {
        let settings = match device {
            "cpu" => [("precision", "fp32"), ("precision", "bf16")],
            _ => [("cache", "exact"), ("cache", "u8")],
        };
        for (model, (key, value)) in video_models().iter().flat_map(|model| settings.map(|setting| (model, setting))) {
            let vae = Vae::open(model).unwrap();
            match vae.configure(key, value) {
                Ok(_) => test(device, &vae),
                Err(why) => why.says(VVAE_ERROR_ARGUMENT, &["cache: u8", "norms"]),
            }
        }
    });
}

fn is_tiled(plan: &vvae_plan_info) -> bool {
    (plan.tile_rows, plan.tile_columns) != (1, 1)
}

#[test]
fn repeated_runs_are_identical() {
    on_every_device_and_precision(|_, vae| {
        for work in works(vae) {
            let first = run(vae, &work);
            assert!(!first.chunks_exact(4).any(|b| f32::from_le_bytes(b.try_into().unwrap()).is_nan()));
            assert_eq!(run(vae, &work), first);
        }
    });
}

#[test]
fn slices_and_chunks_change_no_bit() {
    on_every_device_and_precision(|_, vae| {
        for work in works(vae) {
            let expected = run(vae, &work);
            // Each slice with two chunks, and each chunk with two slices or three.
            let cuts =
                [("1", ["1", "3"]), ("2", ["2", "7"]), ("3", ["1", "3"]), ("5", ["2", "7"]), ("100", ["1", "7"])];
            for (slice, chunk) in cuts.into_iter().flat_map(|(slice, chunks)| chunks.map(|chunk| (slice, chunk))) {
                vae.configure("slice_frames", slice).unwrap();
                vae.configure("chunk_frames", chunk).unwrap();
                assert!(run(vae, &work) == expected, "{} in slices of {slice}, chunks of {chunk}", work.node);
            }
            vae.configure("slice_frames", "auto").unwrap();
            vae.configure("chunk_frames", "auto").unwrap();
        }
    });
}

unsafe extern "C" fn keep_warnings(log: *mut c_void, level: i32, message: *const c_char) {
    // SAFETY: the test passes a log that outlives its handle, and a message is a text.
    let (log, message) = unsafe { (&*log.cast::<Mutex<Vec<String>>>(), CStr::from_ptr(message)) };
    if level >= VVAE_LOG_WARNING {
        log.lock().unwrap().push(message.to_str().unwrap().to_owned());
    }
}

/// 6 latent frames are the most, which the log says.
#[test]
fn longer_slices_than_there_are_count_as_the_longest() {
    let (log, weights) = (Mutex::new(Vec::new()), CString::new(small().to_str().unwrap()).unwrap());
    let log_user = (&raw const log).cast_mut().cast();
    let vae = Vae::create(&vvae_create_info { log: Some(keep_warnings), log_user, ..create_info(&weights) }).unwrap();
    let work = &works(&vae)[2];
    let expected = run(&vae, work);
    for (slice, taken) in [("6", 6), ("7", 6), ("4096", 6)] {
        vae.configure("slice_frames", slice).unwrap();
        assert_eq!(vae.plan(work.node, work.input.shape).unwrap().0.slice_frames, taken);
        assert!(run(&vae, work) == expected, "{slice}");
        drop(vae.stream(work.node, work.input.shape).unwrap());
        let told = std::mem::take(&mut *log.lock().unwrap());
        assert_eq!(told.len(), if slice == "6" { 0 } else { 2 }, "of the run and of the stream: {told:?}");
        let says = |text: &String| text.contains(&format!("slice_frames: {slice}")) && text.contains("6 latent frames");
        assert!(told.iter().all(says), "{told:?}");
    }
}

#[test]
fn threads_change_no_bit() {
    for (model, precision) in video_models().iter().flat_map(|model| ["fp32", "bf16"].map(|of| (model, of))) {
        let vae = Vae::open(model).unwrap();
        vae.configure("precision", precision).unwrap();
        for work in works(&vae) {
            vae.configure("threads", "1").unwrap();
            let expected = run(&vae, &work);
            for threads in ["2", "3", "7", "auto"] {
                vae.configure("threads", threads).unwrap();
                assert!(run(&vae, &work) == expected, "{} with {threads} threads in {precision}", work.node);
            }
        }
    }
}

#[test]
fn streams_change_no_bit() {
    on_every_device_and_precision(|_, vae| {
        for work in works(vae) {
            let expected = run(vae, &work);
            for slice in ["auto", "1", "2"] {
                vae.configure("slice_frames", slice).unwrap();
                for (push, pull) in [(1, 1), (3, 2), (100, 50)] {
                    let stream = vae.stream(work.node, work.input.shape).unwrap();
                    assert!(run_stream(&stream, &work, push, pull) == expected, "{} {slice} {push} {pull}", work.node);
                }
            }
            vae.configure("slice_frames", "auto").unwrap();
        }
    });
}

#[test]
fn tiled_streams_change_no_bit_of_the_tiled_clip() {
    on_every_device_and_precision(|_, vae| {
        for node in ["encode", "decode"] {
            for (key, value) in [("tiled", "true"), ("tile_size", "64"), ("tile_overlap", "16")] {
                vae.configure(&format!("{node}_{key}"), value).unwrap();
            }
        }
        let mut random = Random(3);
        for (node, input, output) in
            [("encode", [1, 3, 13, 80, 72], [1, 16, 4, 10, 9]), ("decode", [2, 16, 4, 9, 10], [2, 3, 13, 72, 80])]
        {
            let work = Work::random(&mut random, node, vae.fitted(input), vae.fitted(output));
            let (plan, text) = vae.plan(node, work.input.shape).unwrap();
            assert!(plan.exact == 0 && text.contains("tiled: not exact"), "{text}");
            let expected = run(vae, &work);
            let stream = vae.stream(node, work.input.shape).unwrap();
            assert!(run_stream(&stream, &work, 2, 3) == expected, "{node}");
        }
    });
}

#[test]
fn memory_limits_without_tiles_change_no_bit() {
    on_every_device_and_precision(|device, vae| {
        for work in works(vae) {
            let expected = run(vae, &work);
            let free = vae.plan(work.node, work.input.shape).unwrap().0;
            // Loading may take more than any plan.
            let is_loading = free.device_bytes > free.weight_bytes + free.workspace_bytes;
            let mut limit = free.device_bytes;
            let mut plans = Vec::new();
            loop {
                vae.configure("memory_limit", &limit.to_string()).unwrap();
                let Ok((plan, _)) = vae.plan(work.node, work.input.shape) else { break };
                if is_tiled(&plan) {
                    break;
                }
                assert!(plan.device_bytes <= limit);
                assert!(run(vae, &work) == expected, "{} within {limit}", work.node);
                plans.push(plan.device_bytes);
                limit = plan.device_bytes - 1;
            }
            // A GPU allocates in large pieces, so small clips have a single plan.
            let one = device != "cpu" || is_loading || work.input.shape[2] == 1;
            assert!(plans.len() > 1 || one, "{} has a single plan: {plans:?}", work.node);
            vae.configure("memory_limit", "auto").unwrap();
        }
    });
}

/// Number of plans with offloaded causal caches, and with offloaded weights.
#[derive(Default)]
struct OffloadedPlans {
    caches: u64,
    weights: u64,
}

/// Runs under decreasing limits, down to `least` percent or until tiles are needed, and compares bits and planned
/// bytes.
fn within_limits(vae: &Vae, work: &Work, least: u64, more: impl Fn(Vec<u8>, &str)) -> OffloadedPlans {
    let expected = run(vae, work);
    let free = vae.plan(work.node, work.input.shape).unwrap().0.device_bytes;
    let mut found = OffloadedPlans::default();
    for percent in (least..98).rev().step_by(4) {
        vae.configure("memory_limit", &(free * percent / 100).to_string()).unwrap();
        let Ok((plan, text)) = vae.plan(work.node, work.input.shape) else { break };
        if is_tiled(&plan) {
            break;
        }
        let text = format!("{} within {percent} %:\n{text}", work.node);
        found.caches += u64::from(plan.offloaded_frame_bytes > 0);
        found.weights += u64::from(plan.offloaded_weight_bytes > 0);
        assert_eq!(text.contains("offloaded weights"), plan.offloaded_weight_bytes > 0, "{text}");
        assert!(run(vae, work) == expected, "{text}");
        let memory = vae.memory();
        assert_eq!((memory.now, memory.host), (plan.device_bytes, plan.host_bytes), "{text}");
        more(expected.clone(), &text);
    }
    found
}

/// Frames large enough for several bands.
#[test]
fn offloaded_causal_caches_change_no_bit() {
    on_every_gpu(|device| {
        let mut random = Random(12);
        for (node, input, output) in
            [("decode", [1, 16, 5, 50, 66], [1, 3, 17, 400, 528]), ("encode", [1, 3, 14, 400, 528], [1, 16, 5, 50, 66])]
        {
            for (model, cache) in [(0, "exact"), (0, "u8"), (1, "exact"), (2, "exact")] {
                let vae = Vae::open(&video_models()[model]).unwrap();
                let work = Work::random(&mut random, node, vae.fitted(input), vae.fitted(output));
                vae.configure("cache", cache).unwrap();
                let found = within_limits(&vae, &work, 20, |expected, text| {
                    // A stream takes a little more than a short clip, so it may need tiles where the clip does not.
                    let [b, c, _, h, w] = work.input.shape;
                    if vae.plan(node, [b, c, 0, h, w]).is_ok_and(|(plan, _)| !is_tiled(&plan)) {
                        let stream = vae.stream(node, work.input.shape).unwrap();
                        assert!(run_stream(&stream, &work, 3, 2) == expected, "streamed {text}");
                    }
                });
                assert!(found.caches > 0, "{node} {cache}");
                assert!(found.weights > 0 || !has_plans_of_cuda(device), "{node} {cache}");
            }
        }
    });
}

/// With the demo's model: only channel groups as wide as the published model's are rematerialised or offloaded.
#[test]
fn rematerialised_wide_frames_change_no_bit() {
    on_every_gpu(|_| {
        let mut random = Random(14);
        // The second size ends inside a tile of rows and inside a band.
        for (height, width) in [(60, 80), (53, 77)] {
            let (latent, video) = ([1, 16, 5, height, width], [1, 3, 17, height * 8, width * 8]);
            let work = Work::random(&mut random, "decode", latent, video);
            let rematerialised = std::cell::Cell::new(0);
            for cache in ["exact", "u8"] {
                let vae = Vae::open(&demo()).unwrap();
                vae.configure("cache", cache).unwrap();
                rematerialised.set(0);
                within_limits(&vae, &work, 10, |_, text| {
                    rematerialised.set(rematerialised.get() + u32::from(text.contains("rematerialised")));
                });
                assert!(rematerialised.get() > 0, "{latent:?} {cache}");
            }
        }
    });
}

/// Most channels are at full resolution, so that its caches take most of the memory. Rates are fixed, so that the plans
/// do not depend on the GPU.
#[test]
fn rematerialised_hidden_frames_change_no_bit() {
    on_every_gpu(|device| {
        let config = Sizes { channels: vec![128, 64, 64, 64], layers: 2, groups: 8, latent: 16, temporal_levels: 2 };
        let folder = Folder::new("hidden-frames");
        let weights = folder.file("wide.safetensors", &to_bytes(&random_weights(&config.model(), 3), config.groups));
        let mut random = Random(15);
        // The second size ends inside a tile of rows and inside a band.
        for (height, width) in [(60, 80), (53, 77)] {
            let (latent, video) = ([1, 16, 5, height, width], [1, 3, 17, height * 8, width * 8]);
            for (node, from, to) in [("decode", latent, video), ("encode", video, latent)] {
                let work = Work::random(&mut random, node, from, to);
                let vae = Vae::open(&weights).unwrap();
                vae.configure("rates", "products=3.2e14,memory=3.6e12,copies=5e10").unwrap();
                let hidden = std::cell::Cell::new(0);
                within_limits(&vae, &work, 20, |_, text| {
                    hidden.set(hidden.get() + u32::from(text.contains("hidden frame")));
                });
                let expected = node == "decode" || has_plans_of_cuda(device);
                assert!(hidden.get() > 0 || !expected, "{node} {latent:?}");
            }
        }
    });
}

#[test]
fn small_limits_change_no_bit_of_a_still_image() {
    on_every_gpu(|_| {
        let mut random = Random(13);
        for (node, input, output) in [
            ("decode", [2, 16, 1, 150, 201], [2, 3, 1, 1200, 1608]),
            ("encode", [2, 3, 1, 1200, 1608], [2, 16, 1, 150, 201]),
        ] {
            let work = Work::random(&mut random, node, input, output);
            let found = within_limits(&Vae::open(&demo()).unwrap(), &work, 10, |_, _| {});
            assert!(found.caches > 0 || node == "encode");
        }
    });
}
