//! The `vvae` command and what users of ffmpeg expect of it: patterns, parts of a clip, containers on standard input,
//! OpenEXR, GIF, animated WebP and ProRes.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use crate::common::command::{fails, header, names, succeeds, text, tool, vvae, y4m};
use crate::common::safetensors::{Folder, Tensor, Tensors, read, to_bytes};
use crate::common::{Buffer, Vae, golden};
use serde_json::Value;
use video_vae::capi::VVAE_DTYPE_U8;

/// The first video stream of a file, its frames counted, and the codec of its sound.
fn probed(path: &Path) -> (Value, u64, Option<String>) {
    let words = ["-v", "error", "-count_frames", "-show_streams", "-of", "json"];
    let output = Command::new("ffprobe").args(words).arg(path).output().unwrap();
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |kind: &str| told["streams"].as_array().unwrap().iter().find(|it| it["codec_type"] == kind).cloned();
    let video = of("video").unwrap_or_default();
    let frames = video["nb_read_frames"].as_str().and_then(|count| count.parse().ok()).unwrap_or(0);
    (video, frames, of("audio").map(|sound| sound["codec_name"].as_str().unwrap().to_owned()))
}

fn ffmpeg(words: &[&str]) {
    let output = Command::new("ffmpeg").args(["-nostdin", "-v", "error", "-y"]).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// What a command that succeeds says on standard error.
fn warnings(words: &[&str]) -> String {
    let output = vvae(words).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words:?}: {told}");
    told
}

#[test]
fn patterns_name_pictures_in_and_out() {
    let folder = Folder::new("formats-patterns");
    let clip = folder.file("clip.y4m", &y4m(16, 16, 4));
    let (pictures, raw, again) = (folder.0.join("f%03d.png"), folder.0.join("a.raw"), folder.0.join("b.raw"));
    succeeds(&["roundtrip", text(&clip), text(&pictures)]);
    assert_eq!(names(&folder.0), ["clip.y4m", "f001.png", "f002.png", "f003.png", "f004.png"]);
    fails(&["roundtrip", text(&clip), text(&pictures)], &["f001.png exists", "-y"]);
    // The same frames as a folder of their own.
    let own = folder.0.join("own");
    succeeds(&["roundtrip", text(&clip), text(&own)]);
    succeeds(&["roundtrip", text(&pictures), text(&raw)]);
    succeeds(&["roundtrip", text(&own), text(&again)]);
    assert_eq!(std::fs::read(&raw).unwrap(), std::fs::read(&again).unwrap());
    assert_eq!(std::fs::metadata(&raw).unwrap().len(), 4 * 16 * 16 * 3);
    std::fs::remove_file(folder.0.join("f003.png")).unwrap();
    fails(&["roundtrip", text(&pictures), text(&raw), "-y"], &["f003.png is missing"]);
    fails(&["roundtrip", text(&folder.0.join("g%d.png")), text(&raw), "-y"], &["no file like g1.png"]);
    fails(&["roundtrip", text(&clip), text(&folder.0.join("g%d.jpg"))], &[".png or .exr"]);
    if tool("ffmpeg") && tool("ffprobe") {
        let jpegs = folder.0.join("j%02d.jpg");
        ffmpeg(&["-i", text(&clip), text(&jpegs)]);
        succeeds(&["roundtrip", text(&jpegs), text(&raw), "-y"]);
        assert_eq!(std::fs::metadata(&raw).unwrap().len(), 4 * 16 * 16 * 3);
    }
}

/// Options that would change nothing are refused, and say what they are for.
#[test]
fn options_without_a_use_are_refused() {
    let folder = Folder::new("formats-options");
    let path = |name: &str| folder.0.join(name);
    let (clip, latent) = (folder.file("clip.y4m", &y4m(16, 16, 2)), path("latent.safetensors"));
    let (clip, latent, y4m, raw) = (text(&clip), text(&latent), path("out.y4m"), path("out.raw"));
    for option in [["--codec", "h264"], ["--quality", "5"], ["--format", "rgb"], ["--y4m", "420"]] {
        fails(&[&["encode", clip, latent], &option[..]].concat(), &["unexpected argument", option[0]]);
        fails(&[&["compare", clip, clip], &option[..]].concat(), &["unexpected argument", option[0]]);
    }
    assert!(!succeeds(&["encode", "--help"]).contains("--lossless"));
    for command in ["encode", "roundtrip"] {
        fails(&[command, clip, latent, "--size", "16x16"], &["--size is for .raw"]);
    }
    fails(&["compare", clip, clip, "--size", "16x16"], &["--size is for .raw"]);
    succeeds(&["encode", clip, latent]);
    for (target, option, why) in [
        (&y4m, ["--codec", "h264"], "video files"),
        (&y4m, ["--quality", "5"], "video files"),
        (&y4m, ["--format", "safetensors"], "the output -"),
        (&y4m, ["--bits", "16"], "8 or 10"),
        (&y4m, ["--bits", "12"], "8 or 10"),
        (&raw, ["--y4m", "420"], ".y4m"),
        (&raw, ["--bits", "10"], "8 or 16"),
        (&path("frames"), ["--bits", "12"], "8 or 16"),
        (&path("f%d.png"), ["--quality", "5"], "video files"),
    ] {
        fails(&[&["roundtrip", clip, text(target)], &option[..]].concat(), &[option[0], why]);
        fails(&[&["decode", latent, text(target)], &option[..]].concat(), &[option[0], why]);
    }
    fails(&["decode", latent, text(&y4m), "--y4m", "420", "--bits", "10"], &["--y4m 420 has 8 bits"]);
    assert_eq!(names(&folder.0), ["clip.y4m", "latent.safetensors"]);
    // The layout of the input in the depth that is asked for.
    succeeds(&["roundtrip", clip, text(&y4m), "--bits", "10"]);
    assert!(header(&y4m).contains(" C420p10 "), "{}", header(&y4m));
    // 16 bits are those of the raw input.
    succeeds(&["roundtrip", clip, text(&raw), "--bits", "16"]);
    succeeds(&["roundtrip", text(&raw), text(&y4m), "--bits", "16", "--size", "16x16", "-y"]);
    assert!(header(&y4m).contains(" C444p10 "), "{}", header(&y4m));
}

/// A model with an alpha channel: pictures bring theirs and get it back. Other models, and other outputs, say that they
/// leave it out.
#[test]
fn alpha_of_pictures_goes_through_models_that_have_it() {
    if !tool("ffmpeg") {
        return;
    }
    let folder = Folder::new("formats-alpha");
    let weights = golden("families/qwen21.safetensors");
    let rgba: Vec<u8> = (0..32 * 48 * 4u32).map(|i| (i * 37 % 251) as u8).collect();
    let opaque: Vec<u8> = rgba.chunks(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2], 255]).collect();
    let raw = |name: &str, pixels: &[u8], format: &str| {
        let (from, to) = (folder.file(&format!("{name}.raw"), pixels), folder.0.join(format!("{name}.png")));
        ffmpeg(&["-f", "rawvideo", "-pix_fmt", format, "-s", "48x32", "-i", text(&from), text(&to)]);
        to
    };
    let rgb: Vec<u8> = rgba.chunks(4).flat_map(|pixel| pixel[..3].to_vec()).collect();
    let pictures = [raw("clear", &rgba, "rgba"), raw("opaque", &opaque, "rgba"), raw("plain", &rgb, "rgb24")];
    // By the library alone.
    let vae = Vae::open(&weights).unwrap();
    let through = |pixels: &[u8]| {
        let mut picture = Buffer::interleaved(VVAE_DTYPE_U8, [1, 4, 1, 32, 48]);
        picture.bytes_mut().copy_from_slice(pixels);
        let mut latent = Buffer::poisoned([1, 64, 1, 2, 3]);
        vae.encode(&picture, &mut latent).unwrap();
        vae.decode(&latent, &mut picture).unwrap();
        picture.bytes().to_vec()
    };
    let model = ["--weights", text(&weights), "--device", "cpu", "-y"];
    let (back, latent) = (folder.0.join("back.png"), folder.0.join("latent.safetensors"));
    for (picture, pixels) in pictures.iter().zip([&rgba, &opaque, &opaque]) {
        let expected = through(pixels);
        let told = warnings(&[&["roundtrip", text(picture), text(&back)], &model[..]].concat());
        assert!(!told.contains("alpha"), "{told}");
        let decoded = folder.0.join("decoded.raw");
        let pixels_of = |png: &Path| {
            ffmpeg(&["-i", text(png), "-f", "rawvideo", "-pix_fmt", "rgba", text(&decoded)]);
            std::fs::read(&decoded).unwrap()
        };
        assert!(pixels_of(&back) == expected, "{}", picture.display());
        succeeds(&[&["encode", text(picture), text(&latent)], &model[..]].concat());
        succeeds(&[&["decode", text(&latent), text(&back)], &model[..]].concat());
        assert!(pixels_of(&back) == expected, "{}", picture.display());
    }
    let told = warnings(&[&["decode", text(&latent), text(&folder.0.join("back.y4m"))], &model[..]].concat());
    assert!(told.contains("back.y4m does not hold alpha"), "{told}");
    let told = warnings(&["encode", text(&pictures[0]), text(&latent), "-y"]);
    assert!(told.contains("latent.safetensors does not hold alpha"), "{told}");
}

/// Latents of the diffusion model, with channels and sizes of their own: the file says what they are.
#[test]
fn latents_of_the_diffusion_model_are_written_and_read() {
    let folder = Folder::new("formats-latents");
    let clip = folder.file("clip.raw", &(0..32 * 64 * 3u32).map(|i| (i * 31 % 251) as u8).collect::<Vec<u8>>());
    let [latent, raw, model] = ["latent.safetensors", "raw.raw", "model.raw"].map(|name| folder.0.join(name));
    for (family, format, shape) in [
        ("flux2", None, vec![1, 128, 2, 4]),
        ("flux", Some("latent_format=flux"), vec![1, 16, 4, 8]),
        ("wan21", None, vec![1, 16, 4, 8]),
        ("qwen21", None, vec![1, 64, 2, 4]),
    ] {
        let weights = golden(&format!("families/{family}.safetensors"));
        let common = ["--weights", text(&weights), "--device", "cpu", "-y"];
        let encode = ["encode", text(&clip), text(&latent), "--size", "64x32"];
        succeeds(&[&encode, &common[..]].concat());
        succeeds(&[&["decode", text(&latent), text(&raw)], &common[..]].concat());
        let set: Vec<&str> =
            format.iter().flat_map(|format| ["--set", format]).chain(["--set", "latents=model"]).collect();
        succeeds(&[&encode, &common[..], &set].concat());
        assert_eq!(read(&latent)["latent"].shape, shape, "{family}");
        // The file knows which latents it has.
        succeeds(&[&["decode", text(&latent), text(&model)], &common[..]].concat());
        let [raw, model] = [&raw, &model].map(|path| std::fs::read(path).unwrap());
        assert_eq!(raw.len(), 32 * 64 * 3);
        let far = raw.iter().zip(&model).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(far <= Some(1), "{family}: {far:?}");
    }
}

/// The frames of a part are those of the clip: what comes out is what a clip of them alone gives.
#[test]
fn a_part_of_a_clip_is_a_clip() {
    let folder = Folder::new("formats-parts");
    let rgb: Vec<u8> = (0..30u8).flat_map(|frame| vec![frame * 8; 16 * 16 * 3]).collect();
    let (clip, part) = (folder.file("clip.raw", &rgb), folder.file("part.raw", &rgb[10 * 768..15 * 768]));
    let [wanted, found] = ["wanted.raw", "found.raw"].map(|name| folder.0.join(name));
    let size = ["--size", "16x16", "--fps", "10", "-y"];
    succeeds(&[&["roundtrip", text(&part), text(&wanted)], &size[..]].concat());
    for words in [&["-ss", "1", "-t", "0.5"][..], &["--ss", "00:01", "-t", "0:0.5"], &["--frames", "10:15"]] {
        succeeds(&[&["roundtrip", text(&clip), text(&found)], &size[..], words].concat());
        assert_eq!(std::fs::read(&wanted).unwrap(), std::fs::read(&found).unwrap(), "{words:?}");
    }
    succeeds(&[&["roundtrip", text(&clip), text(&found), "--frames", "3"], &size[..]].concat());
    assert_eq!(std::fs::metadata(&found).unwrap().len(), 3 * 768);
    let beyond = [&["roundtrip", text(&clip), text(&found), "-ss", "3"], &size[..]].concat();
    fails(&beyond, &["30 frames", "earlier"]);
    fails(&[&["roundtrip", text(&clip), text(&found), "--frames", "3", "-t", "1"], &size[..]].concat(), &["--frames"]);

    // Latents of a part, and a part of latents, which keeps the bits of the whole.
    let [latent, whole] = ["part.safetensors", "whole.safetensors"].map(|name| folder.0.join(name));
    succeeds(&[&["encode", text(&clip), text(&latent), "-ss", "1", "-t", "0.5"], &size[..]].concat());
    succeeds(&["decode", text(&latent), text(&found), "-y"]);
    assert_eq!(std::fs::read(&wanted).unwrap(), std::fs::read(&found).unwrap());
    succeeds(&[&["encode", text(&clip), text(&whole)], &size[..]].concat());
    succeeds(&["decode", text(&whole), text(&wanted), "-y"]);
    succeeds(&["decode", text(&whole), text(&found), "-y", "-ss", "2", "-t", "0.3"]);
    assert_eq!(std::fs::read(&wanted).unwrap()[20 * 768..23 * 768], std::fs::read(&found).unwrap());

    // Numbers are those of the clip.
    let mut other = rgb.clone();
    other[12 * 768..13 * 768].fill(255);
    let other = folder.file("other.raw", &other);
    let said = succeeds(&["compare", text(&clip), text(&other), "--size", "16x16", "--frames", "10:15", "--per-frame"]);
    assert!(said.contains("5 frames") && said.contains("worst frame 12:") && said.contains("frame     14"), "{said}");
}

#[test]
fn containers_come_through_pipes_and_in_parts() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("formats-pipes");
    let (clip, raw, piped) = (folder.0.join("clip.mp4"), folder.0.join("a.raw"), folder.0.join("b.raw"));
    let video = ["-f", "lavfi", "-i", "testsrc2=size=32x16:rate=25:duration=2"];
    let sound = ["-f", "lavfi", "-i", "sine=duration=2", "-c:a", "aac", "-c:v", "libx264"];
    ffmpeg(&[&video[..], &sound, &[text(&clip)]].concat());
    succeeds(&["roundtrip", text(&clip), text(&raw), "--frames", "9"]);
    let mut command = vvae(&["roundtrip", "-", text(&piped), "--frames", "9"]);
    let output = command.stdin(File::open(&clip).unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read(&raw).unwrap(), std::fs::read(&piped).unwrap());
    // Sound is cut with the pictures, and the default of Matroska is no lossless codec.
    let part = folder.0.join("part.mkv");
    succeeds(&["roundtrip", text(&clip), text(&part), "-ss", "0.4", "-t", "1"]);
    let (stream, frames, sound) = probed(&part);
    assert_eq!((stream["codec_name"].as_str(), frames, sound.as_deref()), (Some("hevc"), 25, Some("aac")));
    let words = ["-v", "error", "-show_entries", "format=duration", "-of", "csv=p=0"];
    let told = Command::new("ffprobe").args(words).arg(&part).output().unwrap();
    let seconds: f64 = String::from_utf8_lossy(&told.stdout).trim().parse().unwrap();
    assert!((0.9..1.15).contains(&seconds), "{seconds}");
    fails(&["decode", text(&clip), text(&raw), "-y"], &["no file of latents", "vvae encode", "roundtrip"]);
    let output = vvae(&["roundtrip", "-", text(&piped), "-y"]).stdin(File::open("/dev/null").unwrap()).output();
    assert!(!output.unwrap().status.success());
}

#[test]
fn gif_webp_and_prores_are_written() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("formats-animated");
    let (clip, out) = (folder.file("clip.y4m", &y4m(32, 16, 6)), |name: &str| folder.0.join(name));
    succeeds(&["roundtrip", text(&clip), text(&out("a.gif"))]);
    let (stream, frames, _) = probed(&out("a.gif"));
    assert_eq!((stream["codec_name"].as_str(), frames), (Some("gif"), 6));
    for (name, words) in [("a.webp", &[][..]), ("b.webp", &["--lossless"]), ("c.webp", &["--quality", "60"])] {
        succeeds(&[&["roundtrip", text(&clip), text(&out(name))], words].concat());
        let bytes = std::fs::read(out(name)).unwrap();
        assert!(
            bytes.starts_with(b"RIFF") && (2..=6).contains(&bytes.windows(4).filter(|it| it == b"ANMF").count()),
            "{name}"
        );
    }
    succeeds(&["roundtrip", text(&clip), text(&out("a.mov")), "--codec", "prores"]);
    let (stream, frames, _) = probed(&out("a.mov"));
    assert_eq!((stream["codec_name"].as_str(), stream["pix_fmt"].as_str()), (Some("prores"), Some("yuv422p10le")));
    assert_eq!((frames, stream["profile"].as_str()), (6, Some("HQ")));
    succeeds(&["roundtrip", text(&clip), text(&out("a.mkv")), "--lossless"]);
    assert_eq!(probed(&out("a.mkv")).0["codec_name"], "ffv1");
    fails(&["roundtrip", text(&clip), text(&out("x.mp4")), "--codec", "prores"], &[".mov"]);
    fails(&["roundtrip", text(&clip), text(&out("x.mp4")), "--lossless"], &["--lossless", ".mkv"]);
    fails(&["roundtrip", text(&clip), text(&out("x.gif")), "--quality", "3"], &["no quality"]);
    fails(&["roundtrip", text(&clip), text(&out("x.webp")), "--codec", "av1"], &["no codec"]);
}

/// Floats beyond black and white stay what they are, in both directions.
#[test]
fn openexr_is_neither_rounded_nor_clamped() {
    let folder = Folder::new("formats-exr");
    let path = |name: &str| folder.0.join(name);
    let picture = |name: &str, offset: f32| {
        let pixel = |x: usize, y: usize| (x as f32 / 8.0 + offset, y as f32 / 8.0 - 0.3, 1.7f32);
        exr::prelude::write_rgb_file(path(name), 16, 16, pixel).unwrap();
    };
    picture("in1.exr", 0.0);
    picture("in2.exr", 0.5);
    // As the floats of a tensor from -1 to 1, through the same model.
    let values = |channel: usize, offset: f32| {
        let pixel = move |at: usize| [(at % 16) as f32 / 8.0 + offset, (at / 16) as f32 / 8.0 - 0.3, 1.7];
        (0..256).map(move |at| 2.0 * pixel(at)[channel] - 1.0)
    };
    let planes = (0..3).flat_map(|channel| [0.0, 0.5].map(|offset| values(channel, offset))).flatten();
    let video = Tensor { shape: vec![1, 3, 2, 16, 16], values: planes.collect() };
    let reference = folder.file("reference.safetensors", &to_bytes(&Tensors::from([("video".into(), video)]), 1));
    let (wanted, found) = (path("wanted.safetensors"), path("found.safetensors"));
    succeeds(&["roundtrip", text(&reference), text(&wanted)]);
    succeeds(&["roundtrip", text(&path("in%d.exr")), text(&found)]);
    assert_eq!(std::fs::read(&wanted).unwrap(), std::fs::read(&found).unwrap());
    // Out: the same numbers from 0 to 1, and some of them outside.
    succeeds(&["roundtrip", text(&path("in%d.exr")), text(&path("out%02d.exr"))]);
    let floats = &read(&wanted)["video"].values;
    let image = exr::prelude::read_first_rgba_layer_from_file(
        path("out02.exr"),
        |size, _| vec![[0.0; 3]; size.width() * size.height()],
        |all, at, (r, g, b, _): (f32, f32, f32, f32)| all[at.y() * 16 + at.x()] = [r, g, b],
    );
    let image = image.unwrap().layer_data.channel_data.pixels;
    for (at, pixel) in image.iter().enumerate() {
        for (channel, value) in pixel.iter().enumerate() {
            let float = floats[(channel * 2 + 1) * 256 + at];
            assert!((value - (float + 1.0) / 2.0).abs() < 1e-6, "{value} for {float}");
        }
    }
    succeeds(&["roundtrip", text(&path("in1.exr")), text(&path("one.exr"))]);
    succeeds(&["roundtrip", text(&path("in1.exr")), text(&path("one.png"))]);
    fails(&["roundtrip", text(&path("in%d.exr")), text(&path("two.exr"))], &["one picture"]);
    fails(&["roundtrip", text(&folder.file("no.exr", b"nothing")), text(&path("x.png"))], &["no.exr", "OpenEXR"]);
}
