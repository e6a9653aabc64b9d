//! The `vvae` command and files: what is replaced, latents that know their checkpoint, plans, video through ffmpeg.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::command::{fails, header, names, out, succeeds, text, tool, vvae, y4m};
use crate::common::safetensors::Folder;
use crate::common::{demo, small};

#[test]
fn an_output_that_exists_is_replaced_only_when_asked() {
    let folder = Folder::new("files-overwrite");
    let (clip, target) = (folder.file("clip.y4m", &y4m(16, 16, 2)), folder.file("out.y4m", b"precious"));
    fails(&["roundtrip", text(&clip), text(&target)], &["exists", "-y"]);
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    succeeds(&["roundtrip", text(&clip), text(&target), "-y"]);
    assert!(header(&target).starts_with("YUV4MPEG2"));
    fails(&["make-weights", text(&target)], &["exists", "-y"]);
    fails(&["bench", "--device", "cpu", "--shapes", "1x16x16", "--json", text(&target)], &["exists", "-y"]);
}

/// A device as the target: `make-weights /dev/null` by root once replaced it.
#[cfg(target_os = "linux")]
#[test]
fn a_device_is_never_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let folder = Folder::new("files-device");
    let clip = folder.file("clip.y4m", &y4m(16, 16, 2));
    std::os::unix::fs::symlink("/dev/null", folder.0.join("link.y4m")).unwrap();
    fails(&["make-weights", "/dev/null", "-y"], &["not a regular file"]);
    fails(&["roundtrip", text(&clip), text(&folder.0.join("link.y4m")), "-y"], &["not a regular file"]);
    fails(&["compare", text(&clip), text(&clip), "--sheet", "/dev/null", "-y"], &["not a regular file"]);
    assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
}

#[test]
fn quiet_says_nothing() {
    let folder = Folder::new("files-quiet");
    let (clip, target) = (folder.file("clip.y4m", &y4m(16, 16, 30)), folder.0.join("out.y4m"));
    let output = vvae(&["roundtrip", text(&clip), text(&target), "--quiet"]).output().unwrap();
    assert!(output.status.success() && target.exists());
    assert_eq!((output.stdout.len(), output.stderr.len()), (0, 0));
    // Whether a job fits is told by the exit status.
    for (limit, fits) in [("8GiB", true), ("1KiB", false)] {
        let output = vvae(&["plan", "--decode", "9x64x64", "--limit", limit, "-q"]).output().unwrap();
        assert_eq!(
            (output.status.success(), output.stdout.len(), output.stderr.is_empty()),
            (fits, 0, fits),
            "{limit}"
        );
    }
    assert!(succeeds(&["roundtrip", text(&clip), text(&target), "-y"]).contains("30 frames of 16x16"));
}

#[test]
fn no_checkpoint_is_assumed() {
    let folder = Folder::new("files-weights");
    let (clip, target) = (folder.file("clip.y4m", &y4m(16, 16, 1)), folder.0.join("out.y4m"));
    let run = |words: &[&str]| {
        let output = vvae(&[&["roundtrip", text(&clip), text(&target)], words].concat())
            .env_remove("VIDEO_VAE_WEIGHTS")
            .output()
            .unwrap();
        (output.status.success(), format!("{}{}", out(&output), String::from_utf8_lossy(&output.stderr)))
    };
    let (done, said) = run(&[]);
    assert!(!done && said.contains("--weights FILE") && said.contains("VIDEO_VAE_WEIGHTS"), "{said}");
    assert!(said.contains("--weights demo") && !target.exists(), "{said}");
    let (done, said) = run(&["--weights", "demo"]);
    assert!(done && said.contains("1 frame of 16x16"), "{said}");
}

#[test]
fn latents_know_their_checkpoint_and_video() {
    let folder = Folder::new("files-latents");
    let path = |name: &str| folder.0.join(name);
    let clip = folder.file("clip.y4m", &y4m(50, 38, 5));
    let latent = path("latent.safetensors");
    succeeds(&["encode", text(&clip), text(&latent), "--set", "scaling_factor=0.9152"]);
    let bytes = std::fs::read(&latent).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let metadata = &json["__metadata__"];
    for (key, value) in [
        ("width", "50"),
        ("height", "38"),
        ("frames", "5"),
        ("fps", "30000/1001"),
        ("scaling_factor", "0.9152"),
        ("bits", "8"),
    ] {
        assert_eq!(metadata[key], value, "{key}: {metadata}");
    }
    assert_eq!(metadata["checkpoint"].as_str().unwrap().len(), 16, "{metadata}");

    // A copy of the checkpoint under another name is the same; another checkpoint is refused, or forced.
    let copy = path("copy.safetensors");
    std::fs::copy(small(), &copy).unwrap();
    let target = path("out.y4m");
    succeeds(&["decode", text(&latent), text(&target), "--weights", text(&copy)]);
    let other = ["decode", text(&latent), text(&target), "-y", "--weights"];
    fails(&[&other[..], &[text(&demo())]].concat(), &["another checkpoint", "--force", "latent.safetensors"]);
    succeeds(&[&other[..], &[text(&demo()), "--force"]].concat());
}

/// MiB after a word of a text.
#[track_caller]
fn mebibytes(said: &str, word: &str) -> f64 {
    let rest = said.split_once(word).unwrap_or_else(|| panic!("{word}: {said}")).1.trim_start();
    let (number, rest) = rest.split_once(' ').unwrap();
    let scale = if rest.starts_with("KiB") { 1.0 / 1024.0 } else { 1.0 };
    assert!(rest.starts_with("MiB") || rest.starts_with("KiB"), "{said}");
    number.parse::<f64>().unwrap() * scale
}

/// What `plan` says is what `encode` and `decode` then do: whole for a still and a short clip, a stream for a long one.
#[test]
fn plan_tells_what_the_command_does() {
    let folder = Folder::new("files-plan");
    let (latent, video) = (folder.0.join("latent.safetensors"), folder.0.join("video.raw"));
    for (frames, manner) in [(1, "1 frame of 96x64 on cpu ("), (5, "as a whole"), (40, "as a stream")] {
        let clip = folder.file("clip.y4m", &y4m(96, 64, frames));
        let size = format!("{frames}x64x96");
        let plan = succeeds(&["plan", "--encode", &size, "--decode", &size, "--device", "cpu"]);
        assert!(plan.matches(manner).count() == 2 && !plan.contains(" 0,") && !plan.contains("1 frames"), "{plan}");
        let [encode, decode] = [1, 2].map(|part| plan.split("\n\n").nth(part).unwrap());
        for (planned, said) in [
            (encode, succeeds(&["encode", text(&clip), text(&latent), "-y", "--device", "cpu"])),
            (decode, succeeds(&["decode", text(&latent), text(&video), "-y", "--device", "cpu"])),
        ] {
            let (planned, taken) = (mebibytes(planned, "memory:"), mebibytes(&said, "the model took"));
            assert!((planned - taken).abs() < 0.02 * taken + 0.1, "planned {planned}, taken {taken}: {said}");
        }
    }
}

#[test]
fn a_limit_that_plan_accepts_is_accepted() {
    let folder = Folder::new("files-limits");
    let latent = folder.0.join("latent.safetensors");
    let mut seen = [false; 2];
    for frames in [1, 5, 30] {
        let clip = folder.file("clip.y4m", &y4m(64, 64, frames));
        for limit in ["5MiB", "7.5MiB", "9MiB", "12MiB", "16.25MiB", "24MiB", "0.05GiB"] {
            let settings = ["--limit", limit, "--device", "cpu", "--set", "tiles=never"];
            let done = |words: &[&str]| vvae(&[words, &settings].concat()).output().unwrap().status.success();
            let planned = done(&["plan", "--encode", &format!("{frames}x64x64")]);
            let ran = done(&["encode", text(&clip), text(&latent), "-y"]);
            assert_eq!(planned, ran, "{frames} frames within {limit}");
            seen[usize::from(planned)] = true;
        }
    }
    assert_eq!(seen, [true; 2], "some limits must be too small and some large enough");
}

#[test]
fn a_clip_runs_as_a_whole_where_no_stream_fits() {
    let folder = Folder::new("files-whole");
    let (latent, video) = (folder.0.join("latent.safetensors"), folder.0.join("video.y4m"));
    let limits = ["--limit", "80MiB", "--device", "cpu"];
    let plan = succeeds(&[&["plan", "--decode", "9x256x256"][..], &limits].concat());
    assert!(plan.contains("as a whole") && plan.contains("tiled: not exact"), "{plan}");
    let clip = folder.file("clip.y4m", &y4m(256, 256, 9));
    succeeds(&["encode", text(&clip), text(&latent), "--device", "cpu"]);
    succeeds(&[&["decode", text(&latent), text(&video)][..], &limits].concat());
    assert_eq!(std::fs::metadata(&video).unwrap().len() as usize, 9 * (256 * 256 * 3 + 6) + header(&video).len() + 1);
    let never = [&["decode", text(&latent), text(&video), "-y", "--set", "tiles=never"][..], &limits].concat();
    fails(&never, &["memory_limit", "80.0 MiB"]);
}

#[test]
fn compare_finds_the_worst_frame() {
    let folder = Folder::new("files-compare");
    let mut bytes = y4m(32, 24, 6);
    let clip = folder.file("clip.y4m", &bytes);
    let same = succeeds(&["compare", text(&clip), text(&clip)]);
    assert!(same.contains("6 frames of 32x24") && same.contains("PSNR inf dB, SSIM 1.0000"), "{same}");
    // Frame 4 is spoiled: its first rows of luma become black.
    let frame = 32 * 24 * 3 / 2 + 6;
    let start = bytes.iter().position(|b| *b == b'\n').unwrap() + 1 + 4 * frame + 6;
    bytes[start..start + 128].fill(16);
    let spoiled = folder.file("spoiled.y4m", &bytes);
    let sheet = folder.0.join("sheet.png");
    let said = succeeds(&["compare", text(&clip), text(&spoiled), "--per-frame", "--sheet", text(&sheet)]);
    assert!(said.contains("worst frame 4: PSNR") && said.matches("PSNR    inf dB").count() == 5, "{said}");
    assert!(std::fs::read(&sheet).unwrap().starts_with(b"\x89PNG"));
    let short = folder.file("short.y4m", &y4m(32, 24, 5));
    fails(&["compare", text(&clip), text(&short)], &["shorter"]);
    let wide = folder.file("wide.y4m", &y4m(34, 24, 6));
    fails(&["compare", text(&clip), text(&wide)], &["32x24", "34x24"]);
}

#[test]
fn check_prints_one_line() {
    let said = succeeds(&["check", text(&demo()), "--device", "cpu", "--shape", "5x64x64"]);
    assert_eq!(said.lines().count(), 1, "{said}");
    for word in ["vvae check: demo.safetensors ", "video-vae 0.", "bf16 against fp32: latent ", "dB", "SSIM"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let figure = |before: &str| {
        let rest = said.split_once(before).unwrap().1.trim_start();
        rest.split([' ', ',']).next().unwrap().parse::<f64>().unwrap()
    };
    assert!((1e-5..0.05).contains(&figure("latent")) && figure("video ") > 30.0, "{said}");
    fails(&["check", "nowhere.safetensors"], &["nowhere.safetensors"]);
}

/// The library and the command read one header, by one reader.
#[test]
fn a_header_that_is_too_long_is_refused_alike() {
    let folder = Folder::new("files-header");
    let length = (16u64 << 20) + 8;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.resize(8 + length as usize, b' ');
    let path = folder.file("long.safetensors", &bytes);
    fails(&["info", text(&path)], &["claims 16777224 bytes, expected at most 16777216"]);
    fails(&["decode", text(&path), "out.raw"], &["claims 16777224 bytes, expected at most 16777216"]);
}

fn ffmpeg(words: &[&str]) {
    let output = Command::new("ffmpeg").args(["-nostdin", "-v", "error", "-y"]).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Fields of the video stream and of the audio stream.
fn probed(path: &Path) -> (Vec<String>, Option<String>) {
    let words = ["-v", "error", "-count_frames", "-show_streams", "-of", "json"];
    let output = Command::new("ffprobe").args(words).arg(path).output().unwrap();
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let streams = found["streams"].as_array().unwrap();
    let of = |kind: &str| streams.iter().find(|stream| stream["codec_type"] == kind);
    let keys = ["width", "height", "pix_fmt", "r_frame_rate", "nb_read_frames"];
    let tags = ["color_range", "color_space", "color_transfer", "color_primaries"];
    let video = of("video").unwrap();
    let fields = keys.iter().chain(&tags).map(|key| format!("{key}={}", video[*key])).collect();
    (fields, of("audio").map(|audio| audio["codec_name"].as_str().unwrap().to_owned()))
}

/// Checksum of the sound as it lies in the file.
fn sound(path: &Path) -> Vec<u8> {
    let words = ["-nostdin", "-v", "error", "-i", text(path), "-map", "0:a", "-c", "copy", "-f", "md5", "-"];
    Command::new("ffmpeg").args(words).output().unwrap().stdout
}

/// Half a second with sound: 10 bits, BT.2020, PQ, 24000/1001 frames a second.
fn hdr(folder: &Folder) -> PathBuf {
    let path = folder.0.join("hdr.mp4");
    let tags =
        ["-color_primaries", "bt2020", "-color_trc", "smpte2084", "-colorspace", "bt2020nc", "-color_range", "tv"];
    let video = "testsrc2=size=64x48:rate=24000/1001:duration=0.5";
    let sources = ["-f", "lavfi", "-i", video, "-f", "lavfi", "-i", "sine=frequency=440:duration=0.5"];
    let scale = "scale=out_color_matrix=bt2020:out_range=tv,format=yuv420p10le";
    let codecs = ["-vf", scale, "-c:v", "libx265", "-x265-params", "log-level=error", "-crf", "8", "-c:a", "aac"];
    ffmpeg(&[&sources[..], &codecs, &tags, &[text(&path)]].concat());
    path
}

#[test]
fn hdr_video_with_sound_keeps_what_it_is() {
    if !tool("ffmpeg") {
        return;
    }
    let folder = Folder::new("files-hdr");
    let path = |name: &str| folder.0.join(name);
    let (clip, back) = (hdr(&folder), path("back.mp4"));
    succeeds(&["roundtrip", text(&clip), text(&back), "--weights", text(&demo())]);
    let before = probed(&clip);
    println!("{before:?}");
    assert!(before.0.contains(&"pix_fmt=\"yuv420p10le\"".into()), "{before:?}");
    assert!(before.0.contains(&"r_frame_rate=\"24000/1001\"".into()) && before.1.as_deref() == Some("aac"));
    assert_eq!(probed(&back), before);
    assert!(sound(&clip).starts_with(b"MD5=") && sound(&clip) == sound(&back), "the sound is copied");

    // Through a latent file: all but the sound.
    let (latent, again) = (path("latent.safetensors"), path("again.mp4"));
    succeeds(&["encode", text(&clip), text(&latent), "--weights", text(&demo())]);
    succeeds(&["decode", text(&latent), text(&again), "--weights", text(&demo())]);
    assert_eq!(probed(&again), (before.0, None));

    // 16-bit pictures from 10-bit video, and the colours of the source.
    let pictures = path("pictures/");
    succeeds(&["decode", text(&latent), text(&pictures), "--weights", text(&demo())]);
    assert_eq!(std::fs::read(pictures.join("frame-000001.png")).unwrap()[24], 16, "bits of a sample");
}

#[test]
fn other_containers_and_codecs() {
    if !tool("ffmpeg") {
        return;
    }
    let folder = Folder::new("files-codecs");
    let path = |name: &str| folder.0.join(name);
    let clip = hdr(&folder);
    let webm = path("clip.webm");
    succeeds(&["roundtrip", text(&clip), text(&webm), "--quality", "40"]);
    let (fields, sound) = probed(&webm);
    assert!(fields.contains(&"pix_fmt=\"yuv420p10le\"".into()) && sound.as_deref() == Some("opus"), "{fields:?}");
    assert!(fields.contains(&"color_transfer=\"smpte2084\"".into()), "{fields:?}");
    let eight = path("eight.mp4");
    succeeds(&["roundtrip", text(&clip), text(&eight), "--bits", "8", "--codec", "h264"]);
    assert!(probed(&eight).0.contains(&"pix_fmt=\"yuv420p\"".into()));
    let lossless = path("clip.mkv");
    succeeds(&["roundtrip", text(&clip), text(&lossless), "--lossless"]);
    assert!(probed(&lossless).0.contains(&"pix_fmt=\"gbrp10le\"".into()), "{:?}", probed(&lossless));
    fails(&["roundtrip", text(&clip), text(&path("x.webm")), "--codec", "h264"], &["vp9"]);
    fails(&["roundtrip", text(&clip), text(&path("x.mp4")), "--bits", "16"], &["--bits 16", "12 bits"]);

    // One picture from a JPEG to a JPEG.
    let (still, back) = (path("still.jpg"), path("back.jpg"));
    let frame = folder.file("frame.y4m", &y4m(64, 48, 1));
    ffmpeg(&["-i", text(&frame), "-q:v", "2", "-frames:v", "1", text(&still)]);
    let said = succeeds(&["roundtrip", text(&still), text(&back), "--weights", text(&demo())]);
    assert!(said.contains("1 frame of 64x48") && std::fs::read(&back).unwrap().starts_with(&[0xff, 0xd8]), "{said}");
    let quality = succeeds(&["compare", text(&still), text(&back)]);
    let psnr: f64 = quality.split_once("PSNR ").unwrap().1.split(' ').next().unwrap().parse().unwrap();
    assert!(psnr > 20.0, "{quality}");
    fails(&["roundtrip", text(&folder.file("clip.y4m", &y4m(64, 48, 3))), text(&path("x.jpg"))], &["one picture"]);
    assert!(!names(&folder.0).iter().any(|name| name.starts_with('.')), "{:?}", names(&folder.0));
}

/// Colours survive: what ffmpeg decodes to RGB is what the command reads, and back.
#[test]
fn colours_are_converted_by_the_tags() {
    if !tool("ffmpeg") {
        return;
    }
    let folder = Folder::new("files-colours");
    let path = |name: &str| folder.0.join(name);
    let tagged = path("tagged.mkv");
    let filter = "scale=out_color_matrix=bt2020:out_range=pc,format=yuv444p10le";
    let tags =
        ["-colorspace", "bt2020nc", "-color_primaries", "bt2020", "-color_trc", "smpte2084", "-color_range", "pc"];
    let source = ["-f", "lavfi", "-i", "color=0xC03010:size=32x32:rate=25:duration=0.04", "-vf", filter];
    ffmpeg(&[&source[..], &["-c:v", "ffv1"], &tags, &[text(&tagged)]].concat());
    let red = folder.file("red.raw", &[0xc0, 0x30, 0x10].repeat(32 * 32));
    let said = succeeds(&["compare", text(&tagged), text(&red), "--size", "32x32"]);
    let psnr: f64 = said.split_once("PSNR ").unwrap().1.split(' ').next().unwrap().parse().unwrap();
    // The filter that makes the colour rounds it to 8 bits; a wrong matrix gives less than 30 dB.
    assert!(psnr > 40.0, "{said}");
}
