//! The `vvae` command, run as a user runs it: commands, files, errors, interrupts.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::command::{executable, fails, header, names, out, succeeds, text, vvae, y4m};
use crate::common::process::least_time;
use crate::common::safetensors::{Folder, Tensors, read, to_bytes};
use crate::common::{golden, small};

#[test]
fn help_is_complete() {
    let overview = succeeds(&["--help"]);
    for command in [
        "demo",
        "get",
        "info",
        "devices",
        "plan",
        "encode",
        "decode",
        "roundtrip",
        "make-weights",
        "compare",
        "check",
        "bench",
    ] {
        assert!(overview.contains(command), "{overview}");
        let page = succeeds(&[command, "--help"]);
        assert!(page.contains(&format!("Usage: vvae {command}")) && page.contains("Examples:\n  vvae"), "{page}");
    }
    assert!(succeeds(&["--version"]).contains("ABI 2."));
}

#[test]
fn info_lists_devices_parameters_and_checkpoints() {
    let page = succeeds(&["info"]);
    for word in ["cpu", "Node encode", "Node decode", "memory_limit", "-1..1, 0..1", "optional", "bf16"] {
        assert!(page.contains(word), "{word}: {page}");
    }
    assert!(page.contains("whole number, 0 or more") && !page.contains("184467"), "{page}");
    let page = succeeds(&["info", text(&small())]);
    for line in [
        "family          seedvr2",
        "sizes           channels [16, 32, 32, 32], 1 layers a level, 16 groups, 16 latent channels",
        "latent          16 channels",
        "arithmetic      ",
        "tensors         182",
        "parameters      971,923",
        "sha-256         54d81db496b8d24c394bcef502a7a035cf659995f9c3c93c63a3df523a3abd45",
    ] {
        assert!(page.contains(line), "{line}: {page}");
    }
}

/// As after `cargo build`, a pull, and `cargo run --example vvae`, which builds the library in deps alone.
#[cfg(target_os = "linux")]
#[test]
fn a_stale_library_is_not_opened() {
    let folder = Folder::new("command-stale");
    for name in ["examples", "deps"] {
        std::fs::create_dir(folder.0.join(name)).unwrap();
    }
    let (command, library) = (folder.0.join("examples/vvae"), folder.0.join("deps/libvideo_vae.so"));
    std::fs::copy(executable(), &command).unwrap();
    std::fs::copy(crate::common::library_path(), &library).unwrap();
    folder.file("libvideo_vae.so", b"stale");
    let output = Command::new(&command).arg("--version").env_remove("VIDEO_VAE_LIBRARY").output().unwrap();
    assert!(out(&output).contains(text(&library)), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn plan_prints_text() {
    let page = succeeds(&["plan", "--decode", "121x1080x1920", "--limit", "6GiB"]);
    assert!(page.contains("decode 121 frames of 1920x1080 on ") && page.contains(", as a stream"), "{page}");
    assert!(page.contains("decode a stream of frames 240 x 135") && page.contains(" for 121 frames"), "{page}");
    assert!(page.contains(" cores), as a stream"), "what the device is: {page}");
    let mut command = vvae(&["plan", "--encode", "5x64x64", "--limit=4GiB"]);
    let page = out(&command.env_remove("VIDEO_VAE_WEIGHTS").output().expect("it starts"));
    assert!(page.contains("published") && page.contains("exact"), "{page}");
}

#[test]
fn plan_for_a_card_that_is_not_here() {
    let folder = Folder::new("command-plan-card");
    let (picture, json) = (folder.0.join("plan.svg"), folder.0.join("plan.json"));
    let words =
        ["plan", "--decode", "121x1080x1920", "--device-like", "rtx4090", "--limit", "16GiB", "--set", "cache=u8"];
    let page = succeeds(&[&words[..], &["--picture", text(&picture), "--json", text(&json)]].concat());
    assert!(page.contains("on rtx4090, as a stream") && page.contains("GeForce RTX 4090, which is not here"), "{page}");
    let told: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let plan = &told["results"][0];
    assert_eq!((&plan["estimated_for"], &plan["devices"]), (&"rtx4090".into(), &serde_json::json!(["rtx4090"])));
    let svg = std::fs::read_to_string(&picture).unwrap();
    assert!(svg.contains("on GeForce RTX 4090, an estimate by its published rates"), "{svg}");
    fails(&["plan", "--decode", "5x64x64", "--device-like", "rtx1"], &["device_like", "rtx1", "rtx3060"]);
    fails(&["plan", "--decode", "5x64x64", "--device-like", "a100", "--device", "cpu"], &["--device"]);
    // Which device a plan does not fit.
    fails(
        &["plan", "--decode", "121x1080x1920", "--device", "cpu", "--limit", "100MiB"],
        &["planned for cpu (", "cores"],
    );
}

/// Words that name one thing twice, or are ignored.
#[test]
fn settings_without_a_use_are_refused() {
    let card = ["plan", "--decode", "5x64x64", "--device-like", "h200", "--set", "device_like=a100"];
    fails(&card, &["--device-like", "leave one out"]);
    fails(&["check", "demo", "--weights", "nope"], &["--weights", "leave"]);
    fails(&["check", "demo", "--set", "precision=fp32"], &["precision", "leave"]);
}

/// Errors name what the user wrote, and the page of the command.
#[test]
fn errors_name_the_command_and_the_file() {
    let folder = Folder::new("command-errors-named");
    let clip = folder.file("clip.y4m", &y4m(16, 16, 5));
    let (clip, demo) = (text(&clip), folder.0.join("demo"));
    fails(&["encode", clip, "a.safetensors", "-ss", "-1"], &["\"-1\" is no time", "see: vvae encode --help"]);
    fails(&["-q", "roundtrip", clip, "b.y4m", "-t", "x"], &["\"x\" is no time", "see: vvae roundtrip --help"]);
    fails(&["info", "--limit", "-5"], &["--limit", "see: vvae info --help"]);
    fails(&["plan", "--decode", "1x16x16", "--limit", "-5"], &["memory_limit", "-5"]);
    fails(&["compare", "-", "-"], &["standard input is one clip"]);
    fails(&["demo", "--out", text(&demo), "--set", "nothing=1"], &["nothing"]);
    assert!(!demo.exists());
    fails(&["encode", clip, "a.safetensors", "--frames", "3:9"], &["frames 3 to 8 are not all in the clip"]);
    let json = "{\"__metadata__\":{\"latents\":\"banana\"},\"latent\":{\"dtype\":\"F32\",\"shape\":[1,16,1,1],\
                \"data_offsets\":[0,64]}}";
    let latent =
        folder.file("odd.safetensors", &[&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[0; 64]].concat());
    fails(&["decode", text(&latent), text(&folder.0.join("c.y4m"))], &["odd.safetensors: ", "banana"]);
}

/// A gate that compares nothing does not pass.
#[test]
fn bench_compares_with_figures_of_its_own() {
    let folder = Folder::new("command-bench-against");
    let (plan, saved) = (folder.0.join("plan.json"), folder.0.join("saved.json"));
    succeeds(&["plan", "--decode", "1x16x16", "--json", text(&plan)]);
    let words = |ops: &'static str| ["bench", "--device", "cpu", "--shapes", "1x16x16", "--repeat", "1", "--ops", ops];
    let precision = ["--set", "precision=fp32"];
    let against = |ops, file: &Path| {
        let output = vvae(&[&words(ops)[..], &precision, &["--against", text(file)]].concat()).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (passed, said) = against("encode", &plan);
    assert!(!passed && said.contains("plan.json") && said.contains("`vvae plan`"), "{said}");
    succeeds(&[&words("decode")[..], &precision, &["--json", text(&saved)]].concat());
    let (passed, said) = against("encode", &saved);
    assert!(!passed && said.contains("none of these cases"), "{said}");
}

/// The text of every label of a picture.
fn labels(svg: &str) -> Vec<&str> {
    svg.split("<text").skip(1).filter_map(|part| part.split_once('>')?.1.split('<').next()).collect()
}

#[test]
fn pictures_of_streams_end_with_the_clip_and_count_hours() {
    let folder = Folder::new("command-plan-stream");
    let draw = |frames: &str| {
        let picture = folder.0.join("plan.svg");
        let weights = crate::common::small();
        let words = ["plan", "--decode", frames, "--device", "cpu", "--weights", text(&weights), "-y", "--picture"];
        succeeds(&[&words[..], &[text(&picture)]].concat());
        std::fs::read_to_string(&picture).unwrap()
    };
    let svg = draw("30x64x64");
    let said = labels(&svg).join("|");
    assert!(said.contains("30 frames of 64 x 64 as a stream on cpu") && !said.contains("shown are"), "{said}");
    assert!(said.contains("host memory") && !said.contains("device memory"), "{said}");
    // One clip is longer than what is shown.
    assert!(labels(&draw("3000x64x64")).join("|").contains("shown are the first"));

    let step = |name: &str, start: f64, seconds: f64| serde_json::json!({ "name": name, "stage": 0, "frames": 1, "start": start, "seconds": seconds });
    let mut device = serde_json::json!({
        "device": "cpu", "node": "decode", "input": [1, 16, 0, 8, 8], "output": [1, 3, 0, 64, 64], "exact": true,
        "seconds": 0.0, "device_bytes": 1 << 30, "host_bytes": 0, "text": "", "complete": false, "seconds_shown": 36000.0,
        "steps": [step("conv a", 0.0, 7200.0), step("store", 7200.0, 0.0), step("conv b", 7200.0, 28800.0),
                  step("store", 36000.0, 0.0)],
        "slots": [{ "memory": "device", "content": "activations", "offset": 0, "bytes": 1 << 29, "first": 0, "last": 2 }],
        "fixed": [],
    });
    let whole = vvae::picture::plan(&serde_json::json!({ "devices": [device] })).unwrap();
    assert!(labels(&whole).contains(&"10 h"), "{:?}", labels(&whole));
    vvae::picture::end_with_clip(&mut device, 1, 1, Some(7000.0));
    assert_eq!((device["seconds_shown"].as_f64(), device["steps"].as_array().map(Vec::len)), (Some(7200.0), Some(2)));
    assert_eq!(device["slots"][0]["last"], 1);
    let cut = vvae::picture::plan(&serde_json::json!({ "devices": [device] })).unwrap();
    assert!(labels(&cut).contains(&"2 h") && labels(&cut).join("|").contains("about 1.9 h"), "{:?}", labels(&cut));
}

#[test]
fn make_weights_is_reproducible_and_loads() {
    let folder = Folder::new("command-weights");
    let made = |name: &str, seed: &str, dtype: &str| {
        let path = folder.0.join(name);
        let sizes = ["--channels", "8,16,16", "--groups", "8", "--latent", "4", "--layers", "1", "--temporal", "1"];
        let words = [&["make-weights", text(&path), "--seed", seed, "--dtype", dtype][..], &sizes].concat();
        succeeds(&words);
        path
    };
    let (a, b, c) = (made("a.safetensors", "1", "f32"), made("b.safetensors", "1", "f32"), made("c", "2", "bf16"));
    assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
    let page = succeeds(&["info", text(&c)]);
    for line in
        ["channels [8, 16, 16], 1 layers a level", "latent          4 channels", "BF16", "4 x 4 pixels", "for 2 frames"]
    {
        assert!(page.contains(line), "{line}: {page}");
    }
    let (clip, back) = (folder.file("clip.y4m", &y4m(30, 22, 4)), folder.0.join("back.y4m"));
    succeeds(&["roundtrip", text(&clip), text(&back), "--weights", text(&a)]);
    assert_eq!(std::fs::metadata(&back).unwrap().len() as usize, 4 * (30 * 22 * 3 / 2 + 6) + header(&back).len() + 1);
    fails(&["make-weights", text(&a), "--channels", "8,12", "--groups", "8"], &["--groups", "multiple"]);
}

#[test]
fn roundtrip_through_every_file_type() {
    let folder = Folder::new("command-clips");
    let path = |name: &str| folder.0.join(name);
    let clip = folder.file("clip.y4m", &y4m(50, 38, 7));
    let back = path("back.y4m");
    let said = succeeds(&["roundtrip", text(&clip), text(&back)]);
    assert!(said.contains("7 frames of 50x38") && said.contains("frames/s"), "{said}");
    assert!(header(&back).starts_with("YUV4MPEG2 W50 H38 F30000:1001 Ip A1:1 C420jpeg"), "{}", header(&back));
    let once = std::fs::read(&back).unwrap();
    assert_eq!(once.windows(6).filter(|w| w == b"FRAME\n").count(), 7);
    succeeds(&["roundtrip", text(&clip), text(&back), "-y", "--set", "threads=1", "--limit", "200MiB"]);
    assert_eq!(once, std::fs::read(&back).unwrap(), "threads and limit change no bit");

    // Through a latent file: the same bytes, with size, length and rate.
    let (latent, by_file) = (path("latent.safetensors"), path("by-file.y4m"));
    succeeds(&["encode", text(&clip), text(&latent), "--set", "scaling_factor=0.5"]);
    succeeds(&["decode", text(&latent), text(&by_file), "--y4m", "420jpeg"]);
    assert_eq!(once, std::fs::read(&by_file).unwrap());

    // A folder of pictures, and raw files from it.
    let pictures = path("pictures");
    succeeds(&["decode", text(&latent), text(&pictures)]);
    assert_eq!(names(&pictures).len(), 7);
    let raws = ["a.raw", "b.raw"].map(path);
    for raw in &raws {
        succeeds(&["roundtrip", text(&pictures), text(raw)]);
        assert_eq!(std::fs::metadata(raw).unwrap().len(), 7 * 50 * 38 * 3);
    }
    assert_eq!(std::fs::read(&raws[0]).unwrap(), std::fs::read(&raws[1]).unwrap());
    succeeds(&["roundtrip", text(&raws[0]), text(&path("deep.y4m")), "--size", "50x38", "--y4m", "420p10"]);
    assert!(header(&path("deep.y4m")).contains("C420p10"));
    let (first, image) = (pictures.join("frame-000001.png"), path("image.png"));
    succeeds(&["roundtrip", text(&first), text(&image), "--bits", "16"]);
    assert!(std::fs::read(&image).unwrap().starts_with(b"\x89PNG"));
    assert!(!names(&folder.0).iter().any(|name| name.starts_with('.')), "{:?}", names(&folder.0));
}

/// Frames of a file of raw frames.
fn frames(raw: &Path, bytes: usize, range: std::ops::Range<usize>) -> Vec<u8> {
    std::fs::read(raw).unwrap()[range.start * bytes..range.end * bytes].to_vec()
}

#[test]
fn a_range_has_the_bytes_of_the_whole() {
    let folder = Folder::new("command-ranges");
    let path = |name: &str| folder.0.join(name);
    let clip = folder.file("clip.y4m", &y4m(24, 16, 128));
    let (latent, video) = (path("latent.safetensors"), path("video.raw"));
    succeeds(&["encode", text(&clip), text(&latent)]);
    succeeds(&["decode", text(&latent), text(&video)]);
    let part = path("part.raw");
    for (given, range) in [("118:124", 118..124), ("125:", 125..128), (":2", 0..2), ("21:22", 21..22)] {
        let said = succeeds(&["decode", text(&latent), text(&part), "-y", "--frames", given]);
        assert!(said.contains(&format!("{} frame", range.len())), "{said}");
        assert_eq!(std::fs::read(&part).unwrap(), frames(&video, 24 * 16 * 3, range), "{given}");
    }
    let some = path("some.safetensors");
    for (given, range) in [("26:29", 26..29), ("30:", 30..33)] {
        succeeds(&["encode", text(&clip), text(&some), "-y", "--frames", given]);
        let [whole, found] = [&latent, &some].map(|path| read(path)["latent"].clone());
        let values = 16 * 2 * 3;
        assert_eq!(found.values, whole.values[range.start * values..range.end * values], "{given}");
    }
    fails(&["decode", text(&latent), text(&part), "--frames", "126:129"], &["--frames", "128 frames"]);
    fails(&["decode", text(&latent), text(&part), "--frames", "200:201"], &["129 video frames"]);
    fails(&["encode", text(&clip), text(&some), "--frames", "31:34"], &["not all in the clip"]);
    for bad in ["0", "7:7", "9:3", "a:b", "-1:4"] {
        fails(&["decode", text(&latent), text(&part), &format!("--frames={bad}")], &["--frames", "1000:1100"]);
    }
}

#[test]
fn several_devices_write_the_bytes_of_one() {
    let folder = Folder::new("command-devices");
    let path = |name: &str| folder.0.join(name);
    let clip = folder.file("clip.y4m", &y4m(24, 16, 128));
    let (latent, one, two) = (path("latent.safetensors"), path("one.raw"), path("two.raw"));
    succeeds(&["encode", text(&clip), text(&latent)]);
    succeeds(&["decode", text(&latent), text(&one)]);
    let said = succeeds(&["decode", text(&latent), text(&two), "--device", "cpu,cpu"]);
    assert_eq!(
        said.lines().filter(|line| line.starts_with("  cpu: ") && line.contains(" frames ")).count(),
        2,
        "{said}"
    );
    assert!(std::fs::read(&one).unwrap() == std::fs::read(&two).unwrap());
    fails(&["decode", text(&latent), text(&two), "--device", "cpu,gpu"], &["\"gpu\" is unknown"]);
}

#[test]
fn encode_and_decode_match_the_goldens() {
    let folder = Folder::new("command-numbers");
    let golden = read(&golden("small-clip5.safetensors"));
    let input = Tensors::from([
        ("video".into(), golden["encode_video"].clone()),
        ("latent".into(), golden["decode_latent"].clone()),
    ]);
    let input = folder.file("input.safetensors", &to_bytes(&input, 1));
    let (latent, video) = (folder.0.join("latent.safetensors"), folder.0.join("video.safetensors"));
    succeeds(&["encode", text(&input), text(&latent)]);
    let found = &read(&latent)["latent"];
    let [t, c, h, w] = found.shape[..] else { panic!("{:?}", found.shape) };
    assert_eq!(golden["encode_mean"].shape, [1, c, t, h, w]);
    let plane = |channel: usize, frame: usize| &found.values[(frame * c + channel) * h * w..][..h * w];
    let planes = (0..c).flat_map(|channel| (0..t).map(move |frame| (channel, frame)));
    let swapped: Vec<f32> = planes.flat_map(|(channel, frame)| plane(channel, frame)).copied().collect();
    assert!(relative(&swapped, &golden["encode_mean"].values) < 1e-5);
    succeeds(&["decode", text(&input), text(&video)]);
    let found = &read(&video)["video"];
    assert_eq!(found.shape, golden["decode_video"].shape);
    assert!(relative(&found.values, &golden["decode_video"].values) < 1e-5);
}

fn relative(found: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = found.iter().zip(expected).map(|(f, e)| square(f - e)).sum();
    (error / expected.iter().map(|e| square(*e)).sum::<f64>()).sqrt()
}

#[test]
fn errors_are_one_line() {
    let folder = Folder::new("command-errors");
    let clip = folder.file("clip.y4m", &y4m(16, 16, 2));
    let (clip, target) = (text(&clip), folder.0.join("out.y4m"));
    let target = text(&target);
    fails(&["roundtirp"], &["unrecognized subcommand", "roundtrip"]);
    fails(&["encode"], &["<IN>", "vvae encode --help"]);
    fails(&["roundtrip", clip, target, "--wieghts", "x"], &["--wieghts", "--weights"]);
    fails(&["roundtrip", clip, target, "third"], &["third"]);
    fails(&["roundtrip", clip, target, "--limit"], &["--limit", "value"]);
    fails(&["roundtrip", clip, target, "--weights", "nowhere.safetensors"], &["nowhere.safetensors"]);
    fails(&["roundtrip", clip, target, "--set", "threads=none"], &["threads"]);
    fails(&["roundtrip", clip, target, "--limit", "1MiB"], &["too little", "--limit"]);
    fails(&["roundtrip", clip, target, "--device", "abacus"], &["abacus"]);
    fails(&["roundtrip", "nowhere.y4m", target], &["nowhere.y4m", "does not exist"]);
    fails(&["roundtrip", clip, "nowhere/out.y4m"], &["nowhere", "make it first"]);
    fails(&["roundtrip", clip, "out.xyz"], &[".xyz", ".mp4"]);
    fails(&["roundtrip", clip, text(&folder.0.join("one.png"))], &["one picture", "folder"]);
    fails(&["encode", clip, "latents.bin"], &[".safetensors"]);
    fails(&["decode", text(&small()), target], &["no latents", "latent"]);
    fails(&["info", clip], &["clip.y4m"]);
    fails(&["plan"], &["--decode", "vvae plan"]);
    fails(&["plan", "--decode", "12x34"], &["12x34", "121x1080x1920"]);
    fails(&["bench", "--ops", "sing"], &["sing"]);
    fails(&["encode", clip, "x.safetensors", "--dtype", "f33"], &["similar value", "f32"]);
    let strange = folder.file("strange.mov", b"no video");
    let output = vvae(&["roundtrip", text(&strange), target]).env("FFMPEG", "/nonexistent/ffmpeg").output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("install it"));
    let cut = folder.file("cut.y4m", &y4m(16, 16, 2)[..600]);
    fails(&["roundtrip", text(&cut), target], &["cut short within frame 1"]);
    let raw = folder.file("clip.raw", &[0; 1000]);
    fails(&["roundtrip", text(&raw), target], &["--size"]);
    fails(&["roundtrip", text(&raw), target, "--size", "16x16"], &["1000 bytes", "--size"]);
    assert_eq!(names(&folder.0), ["clip.raw", "clip.y4m", "cut.y4m", "strange.mov"], "failures leave no files");
}

#[test]
fn demo_writes_pictures() {
    let folder = Folder::new("command-demo");
    let said = succeeds(&["demo", "--out", text(&folder.0), "--shape", "5x64x64", "--weights", text(&small())]);
    for word in ["PSNR", "SSIM", "frames/s", "memory", "exact"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert_eq!(names(&folder.0), ["animation.png", "contact-sheet.png", "report.html"]);
    let animation = std::fs::read(folder.0.join("animation.png")).unwrap();
    assert_eq!(animation.windows(4).filter(|w| w == b"fcTL").count(), 5);
}

/// With the project's own checkpoint, the default.
#[test]
fn demo_reaches_its_quality() {
    let folder = Folder::new("command-demo-quality");
    let mut command = vvae(&["demo", "--out", text(&folder.0)]);
    let output = command.env_remove("VIDEO_VAE_WEIGHTS").output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = out(&output);
    let figure = |name: &str| {
        let rest = said.split_once(name).unwrap_or_else(|| panic!("{name}: {said}")).1;
        rest.trim_start().split([' ', ',', '\n']).next().unwrap().parse::<f64>().unwrap()
    };
    assert!(figure("PSNR") >= 30.0 && figure("SSIM") >= 0.95, "{said}");
    assert!((figure("in bf16   PSNR") - figure("PSNR")).abs() < 0.1, "{said}");
}

#[test]
fn bench_prints_a_table_and_json() {
    let folder = Folder::new("command-bench");
    let json = folder.0.join("bench.json");
    let table = succeeds(&["bench", "--device", "cpu", "--shapes", "1x32x32,5x32x32", "--json", text(&json)]);
    assert!(table.lines().count() == 11 && table.contains("GFLOP/s"), "{table}");
    assert!(table.contains("matrix product: - (it is measured on GPUs)"), "{table}");
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let rows = rows["results"].as_array().unwrap();
    assert_eq!(rows.len(), 8);
    assert!(
        ["fp32", "bf16"].iter().all(|precision| rows.iter().filter(|row| row["precision"] == *precision).count() == 4)
    );
    assert!(rows.iter().all(|row| row["seconds"].as_f64() > Some(0.0) && row["peak_bytes"].as_u64() > Some(1 << 20)));
    for row in rows {
        let (published, computed) = (row["tflops"].as_f64().unwrap(), row["computed_tflops"].as_f64().unwrap());
        assert!(0.2 * published < computed && computed < published, "{row}");
        assert!(row["of_product"].is_null() && row["tensors"] == "host", "{row}");
    }
    fails(&["bench", "--device", "cpu", "--device-tensors"], &["--device-tensors", "CPU", "cuda:0"]);

    // Against saved figures: equal ones pass, and ones that were much faster do not.
    let saved = |seconds: f64| {
        let row = |precision: &str| serde_json::json!({ "op": "decode", "precision": precision, "shape": "1x32x32", "tensors": "host", "seconds": seconds });
        folder.file("saved.json", serde_json::json!({ "results": [row("fp32"), row("bf16")] }).to_string().as_bytes())
    };
    let bench = |saved: &Path| {
        let words = ["bench", "--device", "cpu", "--shapes", "1x32x32", "--repeat", "1", "--against", text(saved)];
        vvae(&words).output().expect("it starts")
    };
    let passed = bench(&saved(1e3));
    assert!(passed.status.success() && out(&passed).contains("before 1000.0000 s, ratio 0.000"), "{}", out(&passed));
    assert!(out(&passed).contains("encode fp32 1x32x32: not in the saved file"), "{}", out(&passed));
    let failed = bench(&saved(1e-9));
    assert!(!failed.status.success());
    assert!(
        String::from_utf8_lossy(&failed.stderr).contains("slower than before by more than 10 %: decode fp32 1x32x32")
    );
    fails(&["bench", "--against", "nowhere.json"], &["--against", "nowhere.json"]);
}

#[test]
fn completions_know_commands_and_options() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = succeeds(&["completions", shell]);
        for word in ["roundtrip", "make-weights", "weights", "device-tensors"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    fails(&["completions", "bsh"], &["bash"]);
}

/// As in `vvae ... | head`.
#[test]
fn closed_output_ends_the_command_quietly() {
    let small = small();
    for words in [&["--help"][..], &["--version"], &["encode", "--help"], &["info"], &["info", text(&small)]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        // Closed before the start, or a short page could be written before.
        drop(reader);
        let output = vvae(words).stdout(writer).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(141), ""), "{words:?}");
    }
}

/// A full disk is a failure, unlike a closed pipe.
#[cfg(target_os = "linux")]
#[test]
fn unwritable_output_is_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    let output = vvae(&["info"]).stdout(full).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("vvae: standard output cannot be written") && said.lines().count() == 1, "{said}");
}

#[cfg(unix)]
#[test]
fn interrupt_ends_the_run_and_leaves_no_files() {
    let folder = Folder::new("command-interrupt");
    let clip = folder.file("clip.y4m", &y4m(256, 256, 200));
    let took = least_time(Duration::from_secs(1), || time_to_interrupt(&folder, &clip));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

/// Interrupts a run, and returns the time to its end.
#[cfg(unix)]
fn time_to_interrupt(folder: &Folder, clip: &Path) -> Duration {
    let target = folder.0.join("out.y4m");
    let mut child = vvae(&["roundtrip", text(clip), text(&target)]).spawn().expect("it starts");
    let begun = || names(&folder.0).iter().any(|name| name.starts_with(".part-"));
    let started = Instant::now();
    while !begun() {
        assert!(
            started.elapsed() < Duration::from_secs(120) && child.try_wait().unwrap().is_none(),
            "it did not start"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(300));
    let sent = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().expect("sh");
    assert!(sent.success());
    let started = Instant::now();
    let status = child.wait().expect("it ends");
    let took = started.elapsed();
    assert_eq!(status.code(), Some(130));
    assert_eq!(names(&folder.0), ["clip.y4m"]);
    took
}

#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_the_clip() {
    const CLIP: &str = "clip.y4m";
    let folder = Folder::new("command-memory");
    // Peak memory of the process in KiB. The figure only rises, so the last one counts.
    let peak = |words: &[&str], frames: usize| {
        folder.file(CLIP, &y4m(64, 64, frames));
        let mut child = vvae(&[words, &["-y"]].concat()).current_dir(&folder.0).spawn().expect("it starts");
        let mut peak = 0;
        while child.try_wait().unwrap().is_none() {
            let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            peak = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(peak);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(child.wait().unwrap().success());
        peak
    };
    let (target, sheet) = (folder.0.join("out.y4m"), folder.0.join("sheet.png"));
    let roundtrip = ["roundtrip", CLIP, text(&target)];
    let compare = ["compare", CLIP, "--device", "cpu", "--sheet", text(&sheet)];
    for words in [&roundtrip[..], &compare] {
        let (short, long) = (peak(words, 60), peak(words, 400));
        println!("{words:?}: {short} KiB for 60 frames, {long} KiB for 400");
        assert!(short > 0 && long < short + 4096, "{words:?}: {short} KiB for 60 frames, {long} KiB for 400");
    }
}

#[test]
fn colour_conversion_follows_the_standards() {
    use vvae::files::colour::{Chroma, Matrix, Planes};
    let planes = |horizontal, vertical, bits, full_range, matrix| Planes {
        width: 5,
        height: 3,
        horizontal,
        vertical,
        bits,
        full_range,
        matrix,
    };
    let flat = |planes: Planes, rgb: [f32; 3]| {
        let mut samples = vec![0; planes.samples()];
        planes.pack(|_| rgb, &mut samples).unwrap();
        let chroma = (planes.samples() - 15) / 2;
        [samples[14], samples[15 + chroma - 1], samples[planes.samples() - 1]]
    };
    let (full, half, centred) = (Chroma::Full, Chroma::HalfCosited, Chroma::HalfCentred);
    let bt709 = planes(full, full, 8, false, Matrix::Bt709);
    assert_eq!(flat(bt709, [1.0; 3]), [235, 128, 128]);
    assert_eq!(flat(bt709, [0.0; 3]), [16, 128, 128]);
    assert_eq!(flat(bt709, [1.0, 0.0, 0.0]), [63, 102, 240]);
    assert_eq!(flat(planes(half, centred, 8, false, Matrix::Bt601), [0.0, 0.0, 1.0]), [41, 240, 110]);
    assert_eq!(flat(planes(half, half, 10, false, Matrix::Bt601), [0.0, 1.0, 0.0]), [578, 215, 137]);
    assert_eq!(flat(planes(full, full, 8, true, Matrix::Bt601), [1.0; 3]), [255, 128, 128]);
    for (horizontal, vertical) in [(full, full), (half, full), (centred, centred), (half, centred), (half, half)] {
        let planes = planes(horizontal, vertical, 10, false, Matrix::Bt709);
        let mut samples = vec![0; planes.samples()];
        planes.pack(|i| [i as f32 / 20.0, 0.5, 0.3], &mut samples).unwrap();
        let (mut i, mut worst) = (0, 0.0f32);
        let read = planes.unpack(&samples, |[r, ..]| {
            worst = worst.max((r - i as f32 / 20.0).abs());
            i += 1;
        });
        read.unwrap();
        let allowed = if (horizontal, vertical) == (full, full) { 0.002 } else { 0.25 };
        assert!(i == 15 && worst < allowed, "{horizontal:?} {vertical:?}: {worst}");
    }
}

#[cfg(unix)]
#[test]
fn outputs_replace_regular_files_only_and_follow_links() {
    use std::ffi::{CString, c_char, c_int};
    use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
    unsafe extern "C" {
        fn mkfifo(path: *const c_char, mode: u32) -> c_int;
    }

    let folder = Folder::new("command-files");
    let at = |name: &str| folder.0.join(name);
    let tiny = ["--channels", "16,16", "--groups", "16", "--temporal", "1", "--layers", "1"];
    let make = |target: &Path| [&["make-weights", "-y", text(target)], &tiny[..]].concat().join("\n");
    let words = |joined: &str| joined.split('\n').map(str::to_owned).collect::<Vec<_>>();
    let fifo = CString::new(text(&at("fifo"))).unwrap();
    // SAFETY: a path.
    assert_eq!(unsafe { mkfifo(fifo.as_ptr(), 0o600) }, 0);
    std::fs::create_dir(at("folder")).unwrap();
    symlink("fifo", at("to-fifo")).unwrap();
    symlink("absent", at("to-nothing")).unwrap();
    let before = names(&folder.0);
    for (name, said) in [
        ("fifo", "not a regular file"),
        ("folder", "not a regular file"),
        ("to-fifo", "not a regular file"),
        ("to-nothing", "leads nowhere"),
    ] {
        let words = words(&make(&at(name)));
        fails(&words.iter().map(String::as_str).collect::<Vec<_>>(), &[said]);
    }
    assert_eq!(names(&folder.0), before, "nothing was made or removed");
    assert!(std::fs::symlink_metadata(at("fifo")).unwrap().file_type().is_fifo());

    let real = folder.file("folder/real", b"old");
    symlink("folder/real", at("to-file")).unwrap();
    let inode = std::fs::metadata(&real).unwrap().ino();
    let linked = words(&make(&at("to-file")));
    succeeds(&linked.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(std::fs::symlink_metadata(at("to-file")).unwrap().is_symlink(), "the link stays");
    assert!(std::fs::metadata(&real).unwrap().ino() != inode, "the file that it leads to is replaced as a whole");
    assert!(std::fs::read(&real).unwrap().len() > 1000);
    assert_eq!(names(&at("folder")), ["real"]);
}

/// The name that a draft gets must not be known before, or a link could be planted there.
#[cfg(unix)]
#[test]
fn drafts_have_names_that_cannot_be_planted() {
    let folder = Folder::new("command-drafts");
    let victim = folder.file("victim", b"precious");
    let target = folder.0.join("out.safetensors");
    // A shell replaces itself with the command, which then has the process number that earlier drafts were named by.
    let script = "ln -s \"$1\" \"$2/.part-$$-out.safetensors\"; shift 2; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", text(&victim), text(&folder.0)]).arg(executable());
    command.args(["make-weights", text(&target), "--channels", "16,16", "--groups", "16", "--temporal", "1"]);
    let done = command.args(["--layers", "1"]).output().expect("it starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(std::fs::read(&victim).unwrap() == b"precious");
    assert!(std::fs::symlink_metadata(&target).unwrap().is_file());
}
