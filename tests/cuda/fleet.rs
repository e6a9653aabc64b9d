//! Several devices in one handle, with one GPU as two of them: bits, tensors in device memory, two processes, and the
//! time that the division takes.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::common::{Buffer, Vae, run_info, small};
use crate::driver::Gpu;
use crate::{latent, on_device, open, video};
use video_vae::capi::*;

fn open_two(weights: &Path) -> Vae {
    Vae::open_on(c"cuda:0,cuda:0", weights).unwrap_or_else(|why| panic!("{}", why.text))
}

/// The number of frames that each device computed last.
fn shares(vae: &Vae) -> Vec<i64> {
    let share = |index| {
        let mut info = crate::common::sized::<vvae_handle_device_info>();
        // SAFETY: `struct_size` is right.
        assert_eq!(unsafe { (crate::common::api().vvae_handle_device)(vae.0, index, &mut info) }, VVAE_OK);
        info.frames
    };
    [0, 1].map(share).to_vec()
}

#[test]
fn two_devices_have_the_bits_of_one() {
    let Some(_gpu) = Gpu::open() else { return };
    for precision in ["fp16", "bf16", "fp32"] {
        let (one, two) = (open(&small()), open_two(&small()));
        for vae in [&one, &two] {
            vae.configure("precision", precision).unwrap();
            vae.configure("posterior", "sample").unwrap();
        }
        let latent = latent(41, 7, 9);
        let (mut expected, mut found) = (video(&latent, VVAE_DTYPE_F32), video(&latent, VVAE_DTYPE_F32));
        one.decode(&latent, &mut expected).unwrap();
        two.decode(&latent, &mut found).unwrap();
        assert!(found.bytes() == expected.bytes(), "decode in {precision}");
        assert!(shares(&two).iter().all(|frames| *frames > 20), "{:?}", shares(&two));
        let mut encoded = [(); 2].map(|()| Buffer::new(VVAE_DTYPE_F32, latent.shape));
        one.encode(&expected, &mut encoded[0]).unwrap();
        two.encode(&expected, &mut encoded[1]).unwrap();
        assert!(encoded[0].bytes() == encoded[1].bytes(), "encode in {precision}");
    }
}

#[test]
fn limits_and_device_tensors_change_no_bits() {
    let Some(gpu) = Gpu::open() else { return };
    let two = open_two(&small());
    let latent = latent(33, 50, 66);
    let mut expected = video(&latent, VVAE_DTYPE_F32);
    open(&small()).decode(&latent, &mut expected).unwrap();
    let free = two.plan("decode", latent.shape).unwrap().0.device_bytes / 2;
    for percent in [100, 60, 35] {
        two.configure("memory_limit", &format!("{},{free}", free * percent / 100)).unwrap();
        let (plan, text) = two.plan("decode", latent.shape).unwrap();
        assert!(plan.exact == 1, "{text}");
        let (from, to) = (gpu.copy_of(latent.bytes()), gpu.memory(expected.bytes().len()));
        two.run("decode", &on_device(&latent, &from), &on_device(&expected, &to), &run_info()).unwrap();
        assert!(to.read() == expected.bytes(), "{percent} %: {text}");
    }
    let info = vvae_run_info { flags: VVAE_RUN_HAS_STREAM, ..run_info() };
    let refused = two.decode_with(&latent, &mut expected, &info).unwrap_err();
    refused.says(VVAE_ERROR_ARGUMENT, &["VVAE_RUN_HAS_STREAM", "several"]);
}

/// The GPU has no room, so that the CPU computes from and to tensors that it reaches through copies only.
#[test]
fn a_device_computes_with_tensors_of_another() {
    let Some(gpu) = Gpu::open() else { return };
    let mixed = Vae::open_on(c"cuda:0,cpu", &small()).unwrap_or_else(|why| panic!("{}", why.text));
    let latent = latent(3, 6, 5);
    let mut expected = video(&latent, VVAE_DTYPE_F32);
    mixed.plan("decode", latent.shape).unwrap_err().says(VVAE_ERROR_DEVICE, &["cuda:0", "cpu", "mixed_devices"]);
    mixed.configure("mixed_devices", "allow").unwrap();
    assert!(mixed.plan("decode", latent.shape).unwrap().1.contains("mixed devices"));
    mixed.configure("memory_limit", "1KiB,auto").unwrap();
    Vae::open_on(c"cpu", &small()).unwrap().decode(&latent, &mut expected).unwrap();
    let (from, to) = (gpu.copy_of(latent.bytes()), gpu.memory(expected.bytes().len()));
    mixed.run("decode", &on_device(&latent, &from), &on_device(&expected, &to), &run_info()).unwrap();
    assert!(to.read() == expected.bytes());
    assert_eq!(shares(&mixed), [0, 9]);
}

#[test]
fn streams_on_two_devices_take_device_tensors() {
    let Some(gpu) = Gpu::open() else { return };
    let two = open_two(&small());
    let latent = latent(21, 4, 6);
    let mut expected = video(&latent, VVAE_DTYPE_F32);
    open(&small()).decode(&latent, &mut expected).unwrap();
    let (from, to) = (gpu.copy_of(latent.bytes()), gpu.memory(expected.bytes().len()));
    let stream = two.stream("decode", latent.shape).unwrap();
    assert_eq!(stream.push(Some(&on_device(&latent, &from))).unwrap(), (VVAE_OK, 21));
    stream.push(None).unwrap();
    assert_eq!(stream.pull(&on_device(&expected, &to), None).unwrap(), (VVAE_OK, 81));
    assert!(to.read() == expected.bytes());
}

/// What the child of the test below does: a range, to a file.
#[test]
fn one_of_two_processes() {
    let Ok(job) = std::env::var("VVAE_TEST_RANGE") else { return };
    let (first, path) = job.split_once(':').unwrap();
    let (first, latent) = (first.parse::<i64>().unwrap(), latent(33, 7, 9));
    let vae = open(&small());
    let (from, frames) = vae.range_inputs("decode", 33, first, 64).unwrap();
    let (plane, strides) = (7 * 9, [16 * 33 * 63, 33 * 63, 63, 9, 1]);
    let shape = [1, 16, frames, 7, 9];
    let mut input = latent.tensor();
    (input.shape, input.strides) = (shape.as_ptr(), strides.as_ptr());
    input.byte_offset = (from * plane * 4) as u64;
    let output = Buffer::new(VVAE_DTYPE_F32, [1, 3, 64, 56, 72]);
    vae.run_range("decode", &input, (33, first), &output.tensor(), &run_info()).unwrap();
    std::fs::write(path, output.bytes()).unwrap();
}

#[test]
fn two_processes_have_the_bits_of_one() {
    let Some(_gpu) = Gpu::open() else { return };
    let latent = latent(33, 7, 9);
    let mut whole = video(&latent, VVAE_DTYPE_F32);
    open(&small()).decode(&latent, &mut whole).unwrap();
    let started = [0, 64].map(|first| {
        let path = std::env::temp_dir().join(format!("vvae-range-{}-{first}", std::process::id()));
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "fleet::one_of_two_processes"]);
        child.env("VVAE_TEST_RANGE", format!("{first}:{}", path.display()));
        (first, path, child.spawn().unwrap())
    });
    for (first, path, mut child) in started {
        assert!(child.wait().unwrap().success());
        let (found, plane) = (std::fs::read(&path).unwrap(), 56 * 72 * 4);
        for channel in 0..3 {
            let expected = &whole.bytes()[(channel * 129 + first) * plane..][..64 * plane];
            assert!(found[channel * 64 * plane..][..64 * plane] == *expected, "from frame {first}");
        }
        std::fs::remove_file(path).unwrap();
    }
}

/// VIDEO_VAE_WEIGHTS=FILE cargo test --release --test cuda time_of_two_devices -- --ignored --nocapture
///
/// Two devices that are one GPU, against the sum of their parts, one after the other.
#[test]
#[ignore = "takes the published checkpoint and a minute"]
fn time_of_two_devices_at_720p() {
    let Some(_gpu) = Gpu::open() else { return };
    let Some(weights) = std::env::var_os("VIDEO_VAE_WEIGHTS") else { return println!("set VIDEO_VAE_WEIGHTS") };
    let weights = Path::new(&weights);
    let (input, output) =
        (Buffer::new(VVAE_DTYPE_F16, [1, 16, 51, 90, 160]), Buffer::new(VVAE_DTYPE_U8, [1, 3, 201, 720, 1280]));
    let best = |job: &dyn Fn() -> i32| {
        job();
        let seconds = [(); 3].map(|()| {
            let started = Instant::now();
            job();
            started.elapsed().as_secs_f64()
        });
        seconds.into_iter().fold(f64::INFINITY, f64::min)
    };
    let two = open_two(weights);
    let together = best(&|| two.run("decode", &input.tensor(), &output.tensor(), &run_info()).unwrap());
    let (plan, text) = two.plan("decode", input.shape).unwrap();
    let split = shares(&two)[0];
    let one = open(weights);
    let part = |first: i64, count: i64| {
        let (_, frames) = one.range_inputs("decode", 51, first, count).unwrap();
        let input = Buffer::new(VVAE_DTYPE_F16, [1, 16, frames, 90, 160]);
        let output = Buffer::new(VVAE_DTYPE_U8, [1, 3, count, 720, 1280]);
        best(&|| one.run_range("decode", &input.tensor(), (51, first), &output.tensor(), &run_info()).unwrap())
    };
    let parts = [part(0, split), part(split, 201 - split)];
    let whole = best(&|| one.run("decode", &input.tensor(), &output.tensor(), &run_info()).unwrap());
    let sum = parts[0] + parts[1];
    println!("whole {whole:.2} s; parts {parts:.2?}, together {sum:.2} s; two at once {together:.2} s");
    println!("planned {:.2} s:\n{text}", plan.seconds);
    assert!(together <= 1.05 * sum, "{together:.2} s for parts of {sum:.2} s");
}
