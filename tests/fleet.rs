//! Several devices in one handle: the bits of one device, whoever computes what.

mod common;

use std::ffi::CString;
use std::path::{Path, PathBuf};

use common::progress::{ProgressLog, with_progress};
use common::{Buffer, Failure, Random, Vae, api, golden, outcome, run_info, sized, small};
use video_vae::capi::*;

fn open_on(device: &str, model: &Path) -> Result<Vae, Failure> {
    Vae::open_on(&CString::new(device).unwrap(), model)
}

fn random(shape: [i64; 5]) -> Buffer {
    Buffer::random(&mut Random(shape.iter().sum::<i64>() as u64), shape)
}

fn medium() -> PathBuf {
    golden("medium.safetensors")
}

/// What one device or several make of a clip; the log-variance of encode behind it.
fn run(vae: &Vae, node: &str, input: &Buffer, output: [i64; 5]) -> Result<Vec<Buffer>, Failure> {
    let (mut out, logvar) = (Buffer::poisoned(output), Buffer::poisoned(output));
    if node == "decode" {
        vae.decode_with(input, &mut out, &run_info())?;
        return Ok(vec![out]);
    }
    let tensor = logvar.tensor();
    vae.encode_with(input, &mut out, &vvae_run_info { logvar: &tensor, ..run_info() })?;
    Ok(vec![out, logvar])
}

fn assert_same(one: &[Buffer], several: &[Buffer], what: &str) {
    assert!(one.len() == several.len() && one.iter().zip(several).all(|(a, b)| a.bytes() == b.bytes()), "{what}");
}

/// Node, input and output: long clips, a padded and a cropped one, batches, a still.
const JOBS: [(&str, [i64; 5], [i64; 5]); 8] = [
    ("decode", [1, 16, 33, 2, 3], [1, 3, 129, 16, 24]),
    ("decode", [1, 16, 33, 2, 2], [1, 3, 127, 15, 12]),
    ("encode", [1, 3, 257, 16, 16], [1, 16, 65, 2, 2]),
    ("encode", [1, 3, 254, 15, 8], [1, 16, 65, 2, 1]),
    ("decode", [4, 16, 5, 2, 2], [4, 3, 17, 16, 16]),
    ("decode", [3, 16, 30, 2, 2], [3, 3, 117, 16, 16]),
    ("encode", [5, 3, 9, 16, 16], [5, 16, 3, 2, 2]),
    ("decode", [1, 16, 1, 3, 3], [1, 3, 1, 24, 24]),
];

/// The devices of a plan, by the lines of its text.
fn division(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("  cpu: ")).collect()
}

/// The text of the last run.
fn last_run(vae: &Vae) -> String {
    vae.last_run().unwrap().1
}

#[test]
fn whole_clips_and_batches_have_the_bits_of_one_device() {
    for (model, lists, jobs) in [
        (small(), vec!["cpu,cpu", "cpu,cpu,cpu"], &JOBS[..]),
        (medium(), vec!["cpu,cpu"], &JOBS[1..2]),
        (golden("families/wan21.safetensors"), vec!["cpu,cpu"], &JOBS[..]),
        (golden("families/wan22.safetensors"), vec!["cpu,cpu"], &JOBS[1..4]),
    ] {
        let one = open_on("cpu", &model).unwrap();
        let several: Vec<_> = lists.iter().map(|list| open_on(list, &model).unwrap()).collect();
        for (node, input, output) in jobs {
            let (clip, output) = (random(one.fitted(*input)), one.fitted(*output));
            let expected = run(&one, node, &clip, output).unwrap();
            for (several, list) in several.iter().zip(&lists) {
                let what = format!("{node} {input:?} on {list}");
                assert_same(&expected, &run(several, node, &clip, output).unwrap(), &what);
            }
        }
    }
}

#[test]
fn samples_of_a_batch_are_those_of_one_device() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    for vae in [&one, &several] {
        vae.configure("posterior", "sample").unwrap();
        vae.configure("seed", "7").unwrap();
    }
    for (node, input, output) in JOBS.into_iter().filter(|job| job.0 == "encode") {
        let clip = random(input);
        let expected = run(&one, node, &clip, output).unwrap();
        assert_same(&expected, &run(&several, node, &clip, output).unwrap(), &format!("{input:?}"));
    }
}

#[test]
fn ranges_have_the_bits_of_one_device() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    for (node, input, output) in [JOBS[0], JOBS[2], JOBS[5]] {
        let clip = random(input);
        let ([b, c, frames, h, w], [d, e, outputs, i, j]) = (input, output);
        for (first, count) in [(0, outputs / 2), (outputs / 3, outputs / 2), (outputs - 40, 40), (outputs - 1, 1)] {
            let (from, needed) = several.range_inputs(node, frames, first, count).unwrap();
            let mut tensor = clip.tensor();
            let (shape, strides) = ([b, c, needed, h, w], [c * frames * h * w, frames * h * w, h * w, w, 1]);
            (tensor.shape, tensor.strides) = (shape.as_ptr(), strides.as_ptr());
            tensor.byte_offset = (from * h * w * 4) as u64;
            let results = [&one, &several].map(|vae| {
                let out = Buffer::poisoned([d, e, count, i, j]);
                vae.run_range(node, &tensor, (frames, first), &out.tensor(), &run_info()).unwrap();
                out
            });
            assert_same(&results[..1], &results[1..], &format!("{node} {first} + {count} of {output:?}"));
        }
    }
}

#[test]
fn limits_hold_for_each_device_and_change_no_bits() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    let (node, input, output) = ("decode", [1, 16, 33, 6, 5], [1, 3, 129, 48, 40]);
    let clip = random(input);
    let expected = run(&one, node, &clip, output).unwrap();
    let free = several.plan(node, input).unwrap().0.device_bytes / 2;
    let mut limit = free;
    for _ in 0..3 {
        several.configure("memory_limit", &format!("{limit},{free}")).unwrap();
        let (plan, text) = several.plan(node, input).unwrap();
        assert!(plan.exact == 1 && plan.device_bytes <= limit + free, "{text}");
        assert_same(&expected, &run(&several, node, &clip, output).unwrap(), &text);
        if text.contains("not used") {
            // The first device keeps what it had for the run before.
            break;
        }
        assert!(several.memory().now <= limit + free, "{text}");
        limit = plan.device_bytes - free - 1;
    }
    for (list, says) in [("1GiB,1GiB,1GiB", "3 values, but this handle has 2 devices"), ("1GiB,", "memory_limit")] {
        several.configure("memory_limit", list).unwrap_err().says(VVAE_ERROR_ARGUMENT, &[says]);
    }
    one.configure("memory_limit", "1GiB,1GiB").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["2 values", "1 device"]);
}

#[test]
fn a_device_that_would_need_tiles_is_left_out() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    let (node, input, output) = ("decode", [2, 16, 3, 20, 22], [2, 3, 9, 160, 176]);
    // Memory grows with threads. Two devices share theirs.
    one.configure("threads", "1").unwrap();
    several.configure("threads", "2").unwrap();
    let clip = random(input);
    let expected = run(&one, node, &clip, output).unwrap();
    let mut limit = one.plan(node, [1, 16, 3, 20, 22]).unwrap().0.device_bytes;
    while one.plan(node, [1, 16, 3, 20, 22]).unwrap().0.exact == 1 {
        limit = limit * 31 / 32;
        one.configure("memory_limit", &limit.to_string()).unwrap();
    }
    several.configure("memory_limit", &format!("{limit},auto")).unwrap();
    assert_same(&expected, &run(&several, node, &clip, output).unwrap(), "without tiles");
    assert!(division(&last_run(&several))[0].contains("in tiles only"), "{}", last_run(&several));
    several.configure("memory_limit", &limit.to_string()).unwrap();
    assert_eq!(several.plan(node, input).unwrap().0.exact, 0, "tiles on all if none does without");
}

#[test]
fn a_plan_says_the_division_and_its_figures_are_sums() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    // With many threads memory decides, and each device is estimated to have all of its rate.
    one.configure("threads", "2").unwrap();
    several.configure("threads", "2").unwrap();
    let (node, input, output) = JOBS[0];
    let (whole, _) = one.plan(node, input).unwrap();
    let (plan, text) = several.plan(node, input).unwrap();
    let parts = division(&text);
    assert!(parts.len() == 2 && text.contains("2 devices, efficiency "), "{text}");
    assert!(parts[0].starts_with("clip 0, frames 0 to ") && parts[1].contains(" to 128; about "), "{text}");
    assert!(text.lines().last().unwrap().starts_with("rates: "), "{text}");
    assert_eq!((plan.input_shape, plan.output_shape, plan.exact), (input, output, 1));
    assert_eq!(plan.weight_bytes, 2 * whole.weight_bytes);
    // Each computes with half of the threads.
    assert!(plan.seconds > whole.seconds && plan.seconds < 2.0 * whole.seconds, "{} {text}", whole.seconds);
    let (_, text) = several.plan("decode", [1, 16, 2, 2, 3]).unwrap();
    let idle = division(&text).iter().filter(|parts| parts.starts_with("nothing")).count();
    assert_eq!(idle, 1, "a short clip is not divided: {text}");
    let (_, text) = several.plan("encode", [6, 3, 9, 16, 16]).unwrap();
    assert!(division(&text)[1].starts_with("clips 3 to 5, frames 0 to 2"), "batches by clips: {text}");
}

fn device(vae: &Vae, index: u32) -> Result<vvae_handle_device_info, Failure> {
    let mut info = sized();
    // SAFETY: `struct_size` is right.
    outcome(vae.0, unsafe { (api().vvae_handle_device)(vae.0, index, &mut info) }).map(|_| info)
}

#[test]
fn every_device_has_figures_of_its_own() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    let (node, input, output) = JOBS[0];
    let before = device(&several, 1).unwrap();
    assert_eq!((before.device_count, before.device_type, before.frames, before.now), (2, VVAE_DEVICE_CPU, 0, 0));
    let (plan, text) = several.plan(node, input).unwrap();
    let planned = [0, 1].map(|index| device(&several, index).unwrap());
    assert_eq!(planned[0].device_bytes + planned[1].device_bytes, plan.device_bytes, "{text}");
    assert_eq!(planned[0].seconds.max(planned[1].seconds), plan.seconds, "{text}");
    assert_eq!((planned[0].first_frame, planned[0].frames), (0, planned[1].first_frame), "{text}");
    assert_eq!((planned[0].frames + planned[1].frames, planned[1].measured_seconds), (output[2], 0.0), "{text}");
    run(&several, node, &random(input), output).unwrap();
    let (devices, memory) = ([0, 1].map(|index| device(&several, index).unwrap()), several.memory());
    assert_eq!(devices[0].now + devices[1].now, memory.now);
    assert_eq!(devices[0].peak + devices[1].peak, memory.peak);
    assert!(devices.iter().all(|device| device.measured_seconds > 0.0 && device.unused == 0 && device.id[0] == 99));
    several.configure("memory_limit", "auto,1KiB").unwrap();
    several.plan(node, input).unwrap();
    assert_eq!([0, 1].map(|index| device(&several, index).unwrap().unused), [0, 1]);
    device(&several, 2).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["no device 2", "there are 2"]);
    run(&one, node, &random(input), output).unwrap();
    let (only, memory) = (device(&one, 0).unwrap(), one.memory());
    assert_eq!((only.device_count, only.frames, only.now, only.peak), (1, output[2], memory.now, memory.peak));
    assert!(only.measured_seconds > 0.0);
    device(&one, 1).unwrap_err().says(VVAE_ERROR_ARGUMENT, &["no device 1"]);
}

#[test]
fn progress_is_one_and_rises_to_its_total() {
    let (_, input, output) = JOBS[0];
    // The calling thread sums up what it hears at a time. On a busy machine that is much, so the most of a few counts.
    let calls = (0..5).map(|_| {
        let several = open_on("cpu,cpu", &small()).unwrap();
        let mut log = ProgressLog::default();
        several.decode_with(&random(input), &mut Buffer::poisoned(output), &with_progress(&mut log)).unwrap();
        assert_eq!(log.stages, ["plan", "load", "decode"]);
        assert!(!log.fell && log.last.0 == log.last.1 && log.last.1 > 0, "{:?}", log.last);
        log.calls
    });
    assert!(calls.into_iter().any(|calls| calls > 10));
}

#[test]
fn a_stop_ends_all_devices_and_leaves_a_working_handle() {
    let several = open_on("cpu,cpu", &small()).unwrap();
    let (node, input, output) = JOBS[0];
    let clip = random(input);
    let expected = run(&several, node, &clip, output).unwrap();
    for stop_at in [1, 2, 3, 7, 15] {
        let mut log = ProgressLog { stop_at, ..ProgressLog::default() };
        let mut found = Buffer::poisoned(output);
        match several.decode_with(&clip, &mut found, &with_progress(&mut log)) {
            Err(stopped) => {
                stopped.says(VVAE_ERROR_CANCELLED, &["cancelled"]);
                assert_eq!(log.calls, stop_at, "no progress call after a stop");
            }
            // A calling thread that is scheduled late sums up more in fewer calls.
            Ok(_) => {
                assert!(stop_at > 3 && log.calls < stop_at, "not stopped at call {stop_at} of {}", log.calls);
                assert_same(&expected, &[found], "not stopped");
            }
        }
    }
    assert_same(&expected, &run(&several, node, &clip, output).unwrap(), "after the stops");
}

#[test]
fn a_device_without_room_leaves_its_part_to_the_others() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    let (node, input, output) = JOBS[0];
    let clip = random(input);
    let expected = run(&one, node, &clip, output).unwrap();
    for (limits, unused) in [("1KiB,auto", 0), ("auto,1KiB", 1)] {
        several.configure("memory_limit", limits).unwrap();
        assert_same(&expected, &run(&several, node, &clip, output).unwrap(), limits);
        let text = last_run(&several);
        let parts = division(&text);
        assert!(parts[unused].starts_with("not used: memory_limit: 1.0 KiB is too little"), "{text}");
        assert!(parts[1 - unused].starts_with("clip 0, frames 0 to 128"), "{text}");
    }
    several.configure("memory_limit", "1KiB").unwrap();
    run(&several, node, &clip, output).err().unwrap().says(VVAE_ERROR_MEMORY, &["memory_limit: 1.0 KiB"]);
}

#[test]
fn values_that_are_not_finite_fail_a_run_and_break_a_stream() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    let (node, input, output) = ("decode", [2, 16, 30, 2, 2], [2, 3, 117, 16, 16]);
    let mut clip = random(input);
    clip.f32_mut()[(16 * 30 + 7) * 4] = f32::NAN;
    let expected = run(&one, node, &clip, output).unwrap();
    assert_same(&expected, &run(&several, node, &clip, output).unwrap(), "NaNs propagate alike");
    let refused = [&one, &several].map(|vae| {
        vae.configure("nonfinite", "error").unwrap();
        run(vae, node, &clip, output).err().unwrap()
    });
    refused[1].says(VVAE_ERROR_TENSOR, &["the latent has values", "nonfinite"]);
    assert_eq!(refused[0], refused[1]);
    let stream = several.stream(node, input).unwrap();
    assert!(stream.push(Some(&clip.tensor())).unwrap().1 > 7);
    let room = Buffer::poisoned([2, 3, 8, 16, 16]);
    stream.push(None).unwrap();
    stream.pull(&room.tensor(), None).unwrap_err().says(VVAE_ERROR_TENSOR, &["the latent has values"]);
    stream.pull(&room.tensor(), None).unwrap_err().says(VVAE_ERROR_STATE, &["open another stream"]);
}

#[test]
fn bad_lists_are_refused_before_any_work() {
    for (list, says) in [
        ("cpu,", "\"\" is unknown"),
        ("cpu,gpu", "\"gpu\" is unknown"),
        ("auto,cpu", "\"auto\" is one device"),
        ("cpu,cuda:4096", "cuda:4096"),
    ] {
        open_on(list, &small()).err().expect(list).says(VVAE_ERROR_DEVICE, &["device", says]);
    }
    if common::devices().iter().all(|device| device == "cpu") {
        open_on("cuda:*", &small()).err().unwrap().says(VVAE_ERROR_DEVICE, &["cuda:*", "no CUDA device"]);
    }
    let several = open_on("cpu,cpu", &small()).unwrap();
    let info = vvae_run_info { flags: VVAE_RUN_HAS_STREAM, ..run_info() };
    let (_, input, output) = JOBS[0];
    let refused = several.decode_with(&random(input), &mut Buffer::poisoned(output), &info).unwrap_err();
    refused.says(VVAE_ERROR_ARGUMENT, &["VVAE_RUN_HAS_STREAM", "several"]);
    several.configure("precision", "fp16").unwrap_err();
    several.configure("threads", "1").unwrap();
}

/// Runs a clip through a stream in pieces of random lengths.
fn stream(vae: &Vae, node: &str, input: &Buffer, output: [i64; 5], first: i64, seed: u64) -> Vec<Buffer> {
    let ([b, c, frames, h, w], [d, e, outputs, i, j]) = (input.shape, output);
    let (stream, mut random) = (vae.stream_at(node, input.shape, first).unwrap(), Random(seed));
    let from = if first == 0 { 0 } else { vae.range_inputs(node, frames, first, 0).unwrap().0 };
    let made = vec![Buffer::poisoned([d, e, outputs - first, i, j]); if node == "encode" { 2 } else { 1 }];
    let (mut pushed, mut pulled) = (from, 0);
    let (in_strides, out_strides) = (
        [c * frames * h * w, frames * h * w, h * w, w, 1],
        [e * (outputs - first) * i * j, (outputs - first) * i * j, i * j, j, 1],
    );
    loop {
        if pushed < frames {
            let count = (1 + random.below(30) as i64).min(frames - pushed);
            let shape = [b, c, count, h, w];
            let mut tensor = input.tensor();
            (tensor.shape, tensor.strides) = (shape.as_ptr(), in_strides.as_ptr());
            tensor.byte_offset = (pushed * h * w * 4) as u64;
            pushed += stream.push(Some(&tensor)).unwrap().1;
        } else {
            stream.push(None).unwrap();
        }
        loop {
            let count = (1 + random.below(40) as i64).min((outputs - first - pulled).max(1));
            let shape = [d, e, count, i, j];
            let tensors = made.iter().map(|buffer| {
                let mut tensor = buffer.tensor();
                (tensor.shape, tensor.strides) = (shape.as_ptr(), out_strides.as_ptr());
                tensor.byte_offset = (pulled.min(outputs - first - 1) * i * j * 4) as u64;
                tensor
            });
            let tensors: Vec<_> = tensors.collect();
            let logvar = tensors.get(1).map_or(std::ptr::null(), |tensor| tensor as *const vvae_tensor);
            let (status, written) = stream.pull(&tensors[0], Some(&vvae_run_info { logvar, ..run_info() })).unwrap();
            pulled += written;
            match status {
                VVAE_END => {
                    assert_eq!(pulled, outputs - first);
                    return made;
                }
                VVAE_AGAIN => break,
                _ => {}
            }
        }
    }
}

#[test]
fn streams_have_the_bits_of_one_device() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    for (node, input, output) in [
        ("decode", [1, 16, 60, 2, 2], [1, 3, 237, 16, 16]),
        ("encode", [1, 3, 254, 16, 8], [1, 16, 65, 2, 1]),
        ("decode", [3, 16, 20, 2, 2], [3, 3, 77, 16, 16]),
        ("decode", [1, 16, 1, 2, 2], [1, 3, 1, 16, 16]),
    ] {
        let clip = random(input);
        let whole = run(&one, node, &clip, output).unwrap();
        let (plan, text) = several.plan(node, [input[0], input[1], 0, input[3], input[4]]).unwrap();
        assert!(text.contains(" devices, efficiency ") && text.contains("rounds of ") && plan.seconds == 0.0, "{text}");
        // Short rounds where host memory is scarce.
        for limit in ["auto", "700KiB"] {
            several.configure("host_memory_limit", limit).unwrap();
            assert_same(&whole, &stream(&several, node, &clip, output, 0, 3), &format!("{node} {input:?} {limit}"));
            assert_eq!(several.memory().streams, 0);
        }
        several.configure("host_memory_limit", "auto").unwrap();
        let first = output[2] * 2 / 3;
        let expected = stream(&one, node, &clip, output, first, 5);
        assert_same(&expected, &stream(&several, node, &clip, output, first, 6), &format!("{node} from {first}"));
    }
    several.configure("host_memory_limit", "1KiB").unwrap();
    let refused = several.stream("decode", [1, 16, 0, 2, 2]).err().unwrap();
    refused.says(VVAE_ERROR_MEMORY, &["host_memory_limit: 1.0 KiB is too little"]);
}

#[test]
fn streams_keep_their_settings_and_survive_a_stop() {
    let (one, several) = (open_on("cpu", &small()).unwrap(), open_on("cpu,cpu", &small()).unwrap());
    let (clip, output) = (random([1, 3, 130, 16, 8]), [1, 16, 34, 2, 1]);
    for vae in [&one, &several] {
        vae.configure("posterior", "sample").unwrap();
    }
    let expected = &run(&one, "encode", &clip, output).unwrap()[0];
    let stream = several.stream("encode", clip.shape).unwrap();
    several.configure("posterior", "mean").unwrap();
    let mut pushed = 0;
    while pushed < 130 {
        let shape = [1, 3, 130 - pushed, 16, 8];
        let (mut tensor, strides) = (clip.tensor(), [3 * 130 * 128, 130 * 128, 128, 8, 1]);
        (tensor.shape, tensor.strides) = (shape.as_ptr(), strides.as_ptr());
        tensor.byte_offset = (pushed * 128 * 4) as u64;
        let taken = stream.push(Some(&tensor)).unwrap().1;
        assert!(taken > 0, "the rounds of this test hold the whole clip");
        pushed += taken;
    }
    stream.push(None).unwrap();
    let made = Buffer::poisoned(output);
    let mut log = ProgressLog { stop_at: 4, ..ProgressLog::default() };
    stream.pull(&made.tensor(), Some(&with_progress(&mut log))).unwrap_err().says(VVAE_ERROR_CANCELLED, &[]);
    let (status, written) = stream.pull(&made.tensor(), None).unwrap();
    assert_eq!((status, written), (VVAE_OK, 34));
    assert!(made.bytes() == expected.bytes(), "the sample of the stream's settings");
    assert_eq!(stream.pull(&made.tensor(), None).unwrap(), (VVAE_END, 0));
    assert_eq!(several.memory().streams, 1);
    drop(stream);
}
