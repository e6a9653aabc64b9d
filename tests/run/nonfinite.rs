//! NaN and infinities: exactly the output frames that depend on one are lost, and the host hears of it once.

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Mutex;

use crate::common::{Buffer, Vae, api, create_info, on_every_device, outcome, run_info, small};
use video_vae::capi::*;

/// Long enough that the last frames of the clip no longer depend on the first.
const VIDEO_FRAMES: i64 = 161;
const LATENT_FRAMES: i64 = 41;

/// The model of `small()`: levels, residual blocks per level in the encoder, levels that halve time.
const LEVELS: u64 = 4;
const BLOCKS: u64 = 1;
const TEMPORAL_LEVELS: u64 = 2;

/// The oldest input frame that an output frame of `convs` causal convolutions reads.
fn before(frame: u64, convs: u64) -> u64 {
    frame.saturating_sub(2 * convs)
}

/// Input frames that output frame `frame` of encode depends on: from the oldest to the newest.
fn encoded_from(frame: u64) -> (u64, u64) {
    // From the end: conv_out and the middle, then the levels from the deepest to the first, then conv_in.
    let (mut oldest, mut newest) = (before(frame, 1 + 4), frame);
    for level in (0..LEVELS).rev() {
        if level + 1 < LEVELS && level + TEMPORAL_LEVELS >= LEVELS - 1 {
            (oldest, newest) = (before(2 * oldest, 1), 2 * newest);
        }
        oldest = before(oldest, 2 * BLOCKS);
    }
    (before(oldest, 1), newest)
}

/// The same for decode.
fn decoded_from(frame: u64) -> (u64, u64) {
    let (mut oldest, mut newest) = (before(frame, 1), frame);
    for level in (0..LEVELS).rev() {
        oldest = before(oldest, 2 * (BLOCKS + 1));
        // An upsampler ends in a causal convolution. Before it, the unfolding makes frames 2t - 1 and 2t of input t.
        if level > 0 {
            oldest = before(oldest, 1);
        }
        if (1..=TEMPORAL_LEVELS).contains(&level) {
            (oldest, newest) = (oldest.div_ceil(2), newest.div_ceil(2));
        }
    }
    (before(oldest, 1 + 4), newest)
}

static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" fn log(_: *mut c_void, level: i32, message: *const c_char) {
    if level == VVAE_LOG_WARNING {
        // SAFETY: the library passes a text that ends with a NUL.
        LOG.lock().unwrap().push(unsafe { CStr::from_ptr(message) }.to_str().unwrap().to_owned());
    }
}

/// One test at a time has the log.
fn with_log(device: &str) -> Vae {
    let (weights, device) = (CString::new(small().to_str().unwrap()).unwrap(), CString::new(device).unwrap());
    Vae::create(&vvae_create_info { log: Some(log), device: device.as_ptr(), ..create_info(&weights) }).unwrap()
}

fn warnings() -> Vec<String> {
    LOG.lock().unwrap().drain(..).collect()
}

fn noise(shape: [i64; 5]) -> Buffer {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i| ((i as f32) * 0.7389).sin() * 0.8).collect();
    Buffer::from_f32(shape, &values)
}

/// Writes a value into one pixel of a frame of the last clip.
fn spoil(buffer: &mut Buffer, frame: u64, value: f32) {
    let [b, c, t, h, w] = buffer.shape;
    let at = ((((b - 1) * c + c - 1) * t + frame as i64) * h + h - 1) * w;
    buffer.f32_mut()[at as usize] = value;
}

fn run(vae: &Vae, encode: bool, input: &Buffer, output: &mut Buffer) {
    let done = if encode { vae.encode(input, output) } else { vae.decode(input, output) };
    done.unwrap();
}

/// Frame `t` of clip `b`.
fn frame(buffer: &Buffer, b: i64, t: i64) -> Vec<f32> {
    let [_, c, frames, h, w] = buffer.shape;
    let plane = (h * w) as usize;
    let planes = (0..c).map(|channel| (((b * c + channel) * frames + t) * h * w) as usize);
    planes.flat_map(|at| buffer.f32()[at..at + plane].to_vec()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Compares a run on a spoilt frame with one on the clean input.
fn check(clean: &Buffer, spoilt: &Buffer, from: fn(u64) -> (u64, u64), bad: u64, how: &str) {
    let [batch, _, frames, ..] = clean.shape;
    let mut lost = 0;
    for b in 0..batch {
        for t in 0..frames {
            let (oldest, newest) = from(t as u64);
            let depends = b == batch - 1 && (oldest..=newest).contains(&bad);
            lost += usize::from(depends);
            let (expected, found) = (frame(clean, b, t), frame(spoilt, b, t));
            match depends {
                true => assert!(found.iter().all(|v| !v.is_finite()), "{how}: frame {t} of clip {b} has finite values"),
                false => assert!(bits(&found) == bits(&expected), "{how}: frame {t} of clip {b} has other bits"),
            }
        }
    }
    assert!(lost > 0 && lost < frames as usize, "{how}: {lost} of {frames} frames depend on frame {bad}");
}

#[test]
fn exactly_the_frames_that_depend_on_it_are_not_finite() {
    on_every_device(|device| {
        let vae = with_log(device);
        for (encode, shape, out, from) in [
            (true, [2, 3, VIDEO_FRAMES, 16, 16], [2, 16, LATENT_FRAMES, 2, 2], encoded_from as fn(u64) -> (u64, u64)),
            (false, [2, 16, LATENT_FRAMES, 2, 2], [2, 3, VIDEO_FRAMES, 16, 16], decoded_from),
        ] {
            let input = noise(shape);
            let mut clean = Buffer::new(VVAE_DTYPE_F32, out);
            vae.configure("slice_frames", "auto").unwrap();
            run(&vae, encode, &input, &mut clean);
            assert_eq!(warnings(), [""; 0], "{device}");
            for (value, bad, slice) in
                [(f32::NAN, 5, "auto"), (f32::INFINITY, 5, "1"), (f32::NEG_INFINITY, 9, "3"), (f32::NAN, 0, "2")]
            {
                vae.configure("slice_frames", slice).unwrap();
                let mut spoilt = input.clone();
                spoil(&mut spoilt, bad, value);
                let mut found = Buffer::new(VVAE_DTYPE_F32, out);
                run(&vae, encode, &spoilt, &mut found);
                check(&clean, &found, from, bad, &format!("{device}, encode {encode}, {value} in frame {bad}"));
                let told = warnings();
                assert!(told.len() == 1 && told[0].contains("NaN or infinite"), "{device}: {told:?}");
            }
            run(&vae, encode, &input, &mut clean);
            assert_eq!(warnings(), [""; 0], "{device}: the next run is told nothing");
        }
        errors_come_after_the_run(device);
        streams_are_told_once(device);
        integers_become_zero(device);
    });
}

/// What a run writes is the same with `nonfinite=error`, which fails after it.
fn errors_come_after_the_run(device: &str) {
    let vae = with_log(device);
    for (encode, shape, out) in
        [(true, [2, 3, 9, 16, 16], [2, 16, 3, 2, 2]), (false, [2, 16, 3, 2, 2], [2, 3, 9, 16, 16])]
    {
        let (mut input, mut expected) = (noise(shape), Buffer::new(VVAE_DTYPE_F32, out));
        vae.configure("nonfinite", "error").unwrap();
        run(&vae, encode, &input, &mut expected);
        spoil(&mut input, 1, f32::NAN);
        vae.configure("nonfinite", "propagate").unwrap();
        run(&vae, encode, &input, &mut expected);
        vae.configure("nonfinite", "error").unwrap();
        assert_eq!(warnings().len(), 1, "{device}");
        let mut found = Buffer::poisoned(out);
        let failed = if encode { vae.encode(&input, &mut found) } else { vae.decode(&input, &mut found) };
        let name = if encode { "the video has values" } else { "the latent has values" };
        failed.unwrap_err().says(VVAE_ERROR_TENSOR, &[name, "NaN or infinite", "nonfinite", "propagate"]);
        assert!(bits(found.f32()) == bits(expected.f32()), "{device}: the output of a call that failed");
        assert_eq!(warnings().len(), 1, "{device}: the failure itself");
    }
    vae.configure("nonfinite", "ignore").unwrap_err().says(VVAE_ERROR_ARGUMENT, &["propagate, error"]);
    warnings();
}

fn streams_are_told_once(device: &str) {
    let vae = with_log(device);
    let (good, mut bad) = (noise([1, 16, 1, 2, 2]), noise([1, 16, 1, 2, 2]));
    spoil(&mut bad, 0, f32::NAN);
    let stream = vae.stream("decode", good.shape).unwrap();
    let video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 4, 16, 16]);
    for latent in [&good, &bad, &good, &good] {
        stream.push(Some(&latent.tensor())).unwrap();
        while stream.pull(&video.tensor(), None).unwrap().0 == VVAE_OK {}
    }
    let told = warnings();
    assert!(told.len() == 1 && told[0].contains("the latent has values"), "{device}: {told:?}");

    // The pull after the bad frame fails, and the stream ends there.
    vae.configure("nonfinite", "error").unwrap();
    let stream = vae.stream("decode", good.shape).unwrap();
    let failed = [&good, &good, &bad, &good].iter().enumerate().find_map(|(index, latent)| {
        stream.push(Some(&latent.tensor())).unwrap();
        loop {
            match stream.pull(&video.tensor(), None) {
                Ok((VVAE_OK, _)) => {}
                Ok(_) => return None,
                Err(failed) => return Some((index, failed)),
            }
        }
    });
    let (index, failed) = failed.expect("a failure");
    assert_eq!(index, 2, "{device}");
    failed.says(VVAE_ERROR_TENSOR, &["the latent has values", "nonfinite"]);
    stream.push(Some(&good.tensor())).unwrap_err().says(VVAE_ERROR_STATE, &["open another stream"]);
    warnings();
}

fn integers_become_zero(device: &str) {
    let vae = with_log(device);
    let mut latent = noise([1, 16, 2, 2, 2]);
    let mut clean = Buffer::new(VVAE_DTYPE_U8, [1, 3, 5, 16, 16]);
    run(&vae, false, &latent, &mut clean);
    spoil(&mut latent, 1, f32::NAN);
    for dtype in [VVAE_DTYPE_U8, VVAE_DTYPE_U16] {
        let mut video = Buffer::new(dtype, [1, 3, 5, 16, 16]);
        video.bytes_mut().fill(0xa5);
        run(&vae, false, &latent, &mut video);
        let step = (dtype >> 8 & 0xff) as usize / 8;
        for (plane, bytes) in video.bytes().chunks(256 * step).enumerate() {
            let kept = plane % 5 == 0;
            assert!(kept || bytes.iter().all(|byte| *byte == 0), "{device}: frame {} is not black", plane % 5);
            if kept && step == 1 {
                assert!(*bytes == clean.bytes()[plane * 256..][..256], "{device}: frame 0 has other bits");
            }
        }
        let told = warnings();
        assert!(told.len() == 1 && told[0].contains("0 in integers"), "{device}: {told:?}");
    }
    // A tensor that nobody can read as a number is refused before all of this.
    let strange = vvae_tensor { dtype: 0, ..latent.tensor() };
    // SAFETY: the tensors describe their buffers.
    let status = unsafe { (api().vvae_decode)(vae.0, &strange, &clean.tensor(), &run_info()) };
    outcome(vae.0, status).unwrap_err().says(VVAE_ERROR_TENSOR, &["dtype"]);
    warnings();
}
