//! `vvae compare` with one clip: precisions and settings beside each other, their figures, the sheet, errors.

use std::path::Path;
use std::process::Stdio;

use crate::common::command::{fails, names, out, succeeds, text, vvae, y4m};
use crate::common::root;
use crate::common::safetensors::{Folder, read};
use serde_json::Value;

const SIZE: [usize; 2] = [48, 40];

/// Interleaved RGB of moving waves.
fn raw(frames: usize) -> Vec<u8> {
    let [width, height] = SIZE;
    let value = |i: usize| {
        let (colour, x, y, frame) = (i % 3, i / 3 % width, i / 3 / width % height, i / 3 / width / height);
        128.0 + 100.0 * ((x * (colour + 1) + 2 * y + 5 * frame) as f64 / 11.0).sin()
    };
    (0..frames * width * height * 3).map(|i| value(i) as u8).collect()
}

fn parsed(path: &Path) -> Vec<Value> {
    let told: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    told["results"].as_array().unwrap().clone()
}

fn psnr(square: f64) -> f64 {
    10.0 * (255.0f64 * 255.0 / square).log10()
}

/// Mean squared differences of frames, from 0 to 255.
fn squares(a: &[f64], b: &[f64]) -> Vec<f64> {
    let frame = SIZE[0] * SIZE[1] * 3;
    let mean = |(a, b): (&[f64], &[f64])| a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f64>() / frame as f64;
    a.chunks_exact(frame).zip(b.chunks_exact(frame)).map(mean).collect()
}

/// What `encode` and `decode` give in a precision: the latent, and the video from 0 to 255.
fn decoded(folder: &Folder, clip: &Path, precision: &str) -> (Vec<f32>, Vec<f64>) {
    let setting = format!("precision={precision}");
    let settings = ["--device", "cpu", "--set", &setting, "-y"];
    let (latent, video) = (folder.0.join("latent.safetensors"), folder.0.join(format!("{precision}.raw")));
    let encode = ["encode", text(clip), text(&latent), "--size", "48x40"];
    succeeds(&[&encode[..], &settings].concat());
    succeeds(&[&["decode", text(&latent), text(&video), "--bits", "16"][..], &settings].concat());
    let bytes = std::fs::read(&video).unwrap();
    let video = bytes.chunks_exact(2).map(|b| f64::from(u16::from_le_bytes([b[0], b[1]])) / 257.0).collect();
    (read(&latent)["latent"].values.clone(), video)
}

#[track_caller]
fn near(found: &Value, wanted: f64) {
    let found = found.as_f64().unwrap_or_else(|| panic!("{found} is no number"));
    assert!((found - wanted).abs() <= 1e-5 * wanted.abs(), "{found}, expected {wanted}");
}

#[test]
fn the_figures_are_those_of_the_decoded_files() {
    let folder = Folder::new("compare-figures");
    let bytes = raw(7);
    let (clip, json) = (folder.file("clip.raw", &bytes), folder.0.join("figures.json"));
    let words = ["compare", text(&clip), "--size", "48x40", "--device", "cpu", "--json", text(&json)];
    let table = succeeds(&[&words[..], &["--precisions", "fp32,bf16"]].concat());
    let rows = parsed(&json);
    assert_eq!(
        (rows.len(), &rows[0]["variant"], &rows[1]["settings"]["precision"]),
        (2, &"fp32".into(), &"bf16".into())
    );

    let original: Vec<f64> = bytes.iter().map(|value| f64::from(*value)).collect();
    let [(exact_latent, exact), (latent, video)] = ["fp32", "bf16"].map(|precision| decoded(&folder, &clip, precision));
    let mean = |squares: &[f64]| squares.iter().sum::<f64>() / squares.len() as f64;
    near(&rows[0]["clip_psnr"], psnr(mean(&squares(&original, &exact))));
    near(&rows[1]["clip_psnr"], psnr(mean(&squares(&original, &video))));
    let apart = squares(&exact, &video);
    near(&rows[1]["psnr"], psnr(mean(&apart)));
    let worst = (0..apart.len()).max_by(|a, b| apart[*a].total_cmp(&apart[*b])).unwrap();
    assert_eq!(rows[1]["worst_frame"], worst);
    near(&rows[1]["worst_psnr"], psnr(apart[worst]));
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let error =
        norm(&mut latent.iter().zip(&exact_latent).map(|(x, y)| x - y)) / norm(&mut exact_latent.iter().copied());
    near(&rows[1]["latent_error"], error);
    assert!((1e-4..0.1).contains(&error), "{error}");

    // SSIM, as for any two clips.
    let [a, b] = ["fp32.raw", "bf16.raw"].map(|name| folder.0.join(name));
    let said = succeeds(&["compare", text(&a), text(&b), "--size", "48x40", "--bits", "16"]);
    let ssim = rows[1]["ssim"].as_f64().unwrap();
    assert!(said.contains(&format!("PSNR {:.2} dB, SSIM {ssim:.4}\n", psnr(mean(&apart)))), "{ssim}: {said}");

    // The table says the same.
    let line = table.lines().find(|line| line.starts_with("bf16 ")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let wanted = [
        format!("{:.2}", psnr(mean(&apart))),
        format!("{ssim:.6}"),
        format!("{worst}:"),
        format!("{:.2}", psnr(apart[worst])),
    ];
    assert_eq!(words[1..5], wanted, "{table}");
    assert_eq!((words[5], words[6]), ("dB", &*format!("{error:.1e}")), "{table}");
    assert!(
        table.contains("7 frames of 48x40 through small.safetensors") && table.contains("against fp32:"),
        "{table}"
    );
    for row in &rows {
        let plan = |node: &str| {
            let setting = format!("precision={}", row["variant"].as_str().unwrap());
            succeeds(&["plan", &format!("--{node}"), "7x40x48", "--device", "cpu", "--set", &setting])
        };
        let bytes = row["device_bytes"].as_u64().unwrap() as f64 / (1024.0 * 1024.0);
        let most = ["encode", "decode"].map(plan).iter().map(|plan| mebibytes(plan)).fold(0.0, f64::max);
        assert!((bytes - most).abs() < 0.06, "{bytes} MiB, planned {most} MiB");
        assert!(row["host_bytes"] == 0 && row["exact"] == true, "{row}");
        assert!(
            row["encode_seconds"].as_f64().unwrap() > 0.0 && row["decode_seconds"].as_f64().unwrap() > 0.0,
            "{row}"
        );
    }
}

/// Of the memory that a plan says.
fn mebibytes(plan: &str) -> f64 {
    let said = plan.split_once("memory: ").unwrap().1;
    let (number, unit) = said.split_once(' ').unwrap();
    assert!(unit.starts_with("MiB"), "{plan}");
    number.parse().unwrap()
}

#[test]
fn variants_are_any_settings() {
    let folder = Folder::new("compare-variants");
    let (clip, json) = (folder.file("clip.y4m", &y4m(96, 80, 2)), folder.0.join("figures.json"));
    let tiled = "precision=fp32,decode_tiled=true,decode_tile_size=64,decode_tile_overlap=16";
    let words = ["compare", text(&clip), "--device", "cpu", "--json", text(&json), "--set", "seed=7"];
    let variants = ["--variant", "threads=1,tiles=never", "--variant", tiled];
    let said = succeeds(&[&words[..], &variants].concat());
    let rows = parsed(&json);
    let name = |row: &Value| row["variant"].as_str().unwrap().to_owned();
    let wanted = ["fp32", "threads=1 tiles=never", "fp32 decode_tiled=true decode_tile_size=64 decode_tile_overlap=16"];
    assert_eq!(rows.iter().map(name).collect::<Vec<_>>(), wanted, "the most exact precision comes first");
    // Threads change no bit; tiles do, but not the latent.
    assert!(rows[1]["psnr"].is_null() && rows[1]["worst_frame"].is_null() && rows[1]["ssim"] == 1.0, "{}", rows[1]);
    assert!(said.lines().any(|line| line.starts_with("threads=1 tiles=never") && line.contains("equal")), "{said}");
    assert!(rows[2]["psnr"].as_f64().unwrap() < 80.0 && rows[2]["latent_error"] == 0.0, "{}", rows[2]);
    assert!(rows[1]["exact"] == true && rows[2]["exact"] == false, "{rows:?}");
    assert!(said.contains(&format!("{}: in tiles, which is not exact", wanted[2])), "{said}");

    // Without any list: all that the device has.
    succeeds(&["compare", text(&clip), "--device", "cpu", "--json", text(&json), "-y"]);
    assert_eq!(parsed(&json).iter().map(name).collect::<Vec<_>>(), ["fp32", "bf16"]);
}

/// A clip that is streamed; and a part of it, which is a clip of its own.
#[test]
fn a_part_has_the_figures_of_a_clip_cut_from_it() {
    let folder = Folder::new("compare-part");
    let kept = folder.0.join("kept");
    std::fs::create_dir(&kept).unwrap();
    let bytes = raw(40);
    let frame = SIZE[0] * SIZE[1] * 3;
    let (clip, cut) = (folder.file("clip.raw", &bytes), folder.file("cut.raw", &bytes[10 * frame..35 * frame]));
    let figures = |words: &[&str], stdin: Stdio| {
        let json = folder.0.join("figures.json");
        let rest = ["--size", "48x40", "--device", "cpu", "--precisions", "fp32,bf16", "-y", "--json", text(&json)];
        let mut command = vvae(&[&["compare"], words, &rest].concat());
        let output = command.env("TMPDIR", &kept).stdin(stdin).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(names(&kept).is_empty(), "{:?}", names(&kept));
        let row = parsed(&json).pop().unwrap();
        let keys = ["frames", "psnr", "ssim", "worst_psnr", "latent_error", "clip_psnr", "device_bytes"];
        (row["worst_frame"].as_u64().unwrap(), keys.map(|key| row[key].to_string()), out(&output))
    };
    let alone = figures(&[text(&cut)], Stdio::null());
    assert!(alone.2.starts_with("25 frames"), "{}", alone.2);
    let part = figures(&[text(&clip), "--frames", "10:35"], Stdio::null());
    assert_eq!((part.0, part.1), (alone.0 + 10, alone.1.clone()));
    // From a pipe, and with fewer frames than there are.
    let piped = figures(&["-"], std::fs::File::open(&cut).unwrap().into());
    assert_eq!(piped.1, alone.1);
    assert_eq!(figures(&[text(&clip), "--frames", "3", "--per-frame"], Stdio::null()).2.matches("\nframe ").count(), 2);
    assert_eq!(figures(&[text(&clip), "--frames", "38:"], Stdio::null()).1[0], "2");
}

#[test]
fn the_sheet_has_the_size_that_is_said() {
    let folder = Folder::new("compare-sheet");
    let (clip, sheet) = (folder.file("clip.y4m", &y4m(64, 48, 9)), folder.0.join("sheet.png"));
    let words = ["compare", text(&clip), "--device", "cpu", "--sheet", text(&sheet), "--variant", "precision=bf16"];
    let said = succeeds(&[&words[..], &["--variant", "precision=bf16,threads=1"]].concat());
    let png = std::fs::read(&sheet).unwrap();
    assert!(png.starts_with(b"\x89PNG"));
    let [width, height] = [16, 20].map(|at| u32::from_be_bytes(png[at..at + 4].try_into().unwrap()));
    let line = said.lines().find(|line| line.starts_with(text(&sheet))).unwrap();
    assert!(line.contains(&format!(": {width}x{height}; frames 0")) && line.contains("(the worst)"), "{line}");
    assert!(line.contains("bf16 and bf16 threads=1 less fp32, times ") && line.contains(" around grey"), "{line}");
    // The clip, three variants and two differences. The worst frame may be the first or the middle one.
    assert_eq!(height, 6 * (48 + 14) + 14);
    assert!([2, 3].map(|columns| columns * (64 + 14) + 14).contains(&width), "{width}");
}

#[test]
fn what_cannot_be_compared_is_said_at_once() {
    let folder = Folder::new("compare-errors");
    let (clip, sheet) = (folder.file("clip.y4m", &y4m(32, 24, 2)), folder.file("sheet.png", b"precious"));
    let clip = text(&clip);
    fails(&["compare", clip, "--device", "cpu", "--precisions", "fp32,fp16"], &["fp16", "has fp32 and bf16"]);
    fails(&["compare", clip, "--device", "cpu", "--precisions", "fp32,fp99"], &["fp99", "has fp32 and bf16"]);
    fails(&["compare", clip, "--device", "cpu", "--variant", "precision=fp16,threads=1"], &["has fp32 and bf16"]);
    fails(&["compare", clip, "--variant", "bf16"], &["--variant", "KEY=VALUE"]);
    fails(&["compare", clip, "--device", "cpu", "--variant", "thread=1"], &["\"thread\" is unknown", "threads"]);
    fails(&["compare", clip, clip, "--precisions", "fp32"], &["B", "--precisions"]);
    fails(&["compare", clip, clip, "--device", "cpu"], &["--device", "leave out B"]);
    fails(&["compare", clip, "--trace", "trace.json"], &["--trace", "--variant"]);
    fails(&["compare", clip, "--frames", "2:"], &["no frames from frame 2 on", "--frames"]);
    fails(&["compare", clip, "--frames", "0"], &["--frames", "1000:1100"]);
    fails(&["compare", "nowhere.y4m"], &["nowhere.y4m"]);
    fails(&["compare", clip, "--sheet", text(&sheet)], &["exists", "-y"]);
    fails(&["compare", clip, "--json", text(&sheet)], &["exists", "-y"]);
    assert_eq!(std::fs::read(&sheet).unwrap(), b"precious");
    assert_eq!(names(&folder.0), ["clip.y4m", "sheet.png"]);
}

#[cfg(unix)]
#[test]
fn an_interrupt_leaves_no_frames_behind() {
    use std::time::{Duration, Instant};
    let folder = Folder::new("compare-interrupt");
    let kept = folder.0.join("kept");
    std::fs::create_dir(&kept).unwrap();
    let (clip, sheet) = (folder.file("clip.y4m", &y4m(256, 256, 200)), folder.0.join("sheet.png"));
    let words = ["compare", text(&clip), "--device", "cpu", "--sheet", text(&sheet)];
    let mut child = vvae(&words).env("TMPDIR", &kept).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    // The clip, a latent and a video: the first variant has begun.
    while names(&kept).len() < 3 {
        let running = child.try_wait().unwrap().is_none();
        assert!(running && started.elapsed() < Duration::from_secs(120), "it did not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    let sent = std::process::Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().unwrap();
    assert!(sent.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(names(&kept).is_empty() && names(&folder.0) == ["clip.y4m", "kept"], "{:?}", names(&folder.0));
}

/// The README's table is from the demo's clip and checkpoint. Times are of one machine and not compared; the
/// last digits of bf16 depend on the instruction set.
#[test]
fn the_readme_has_the_figures_of_the_demo() {
    let folder = Folder::new("compare-readme");
    let json = folder.0.join("figures.json");
    succeeds(&["compare", "demo", "--weights", "demo", "--device", "cpu", "--json", text(&json)]);
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    for row in parsed(&json) {
        let start = format!("| {} on the CPU |", row["variant"].as_str().unwrap());
        let line = readme.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no {start}"));
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let said = |cell: usize| cells[cell].split(' ').next().unwrap().parse::<f64>().ok();
        let close = |cell: usize, key: &str, tolerance: f64| match (said(cell), row[key].as_f64()) {
            (Some(said), Some(found)) => assert!((said - found).abs() < tolerance, "{key} is {found}: {line}"),
            (said, found) => assert!(said.is_none() && found.is_none(), "{key}: {line}"),
        };
        close(2, "psnr", 0.5);
        close(3, "ssim", 2e-4);
        close(4, "worst_psnr", 0.7);
        close(5, "latent_error", 2e-3);
        close(6, "clip_psnr", 0.05);
    }
}
