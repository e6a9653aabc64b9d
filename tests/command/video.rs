//! The `vvae` command and video files, through ffmpeg: nothing is lost in silence. Full disks, damaged input, the times
//! of frames, and what files have beside pictures.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::command::{executable, fails, header, names, succeeds, text, tool, vvae, y4m};
use crate::common::safetensors::Folder;
use crate::common::small;
use serde_json::Value;

fn ffmpeg(words: &[&str]) {
    let output = Command::new("ffmpeg").args(["-nostdin", "-v", "error", "-y"]).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Runs it, asserts success, and returns what it says on standard error.
#[track_caller]
fn warnings(words: &[&str]) -> String {
    let output = vvae(words).output().expect("it starts");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{words:?}: {said}");
    said
}

fn probed(path: &Path, words: &[&str]) -> Value {
    let output = Command::new("ffprobe").args(["-v", "error", "-of", "json"]).args(words).arg(path).output().unwrap();
    assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A file as a whole.
struct Found(Value);

impl Found {
    fn of(path: &Path) -> Found {
        Found(probed(path, &["-count_frames", "-show_streams", "-show_format", "-show_chapters"]))
    }

    fn stream(&self, kind: &str) -> Option<&Value> {
        self.0["streams"].as_array().unwrap().iter().find(|stream| stream["codec_type"] == kind)
    }

    fn video(&self) -> &Value {
        self.stream("video").unwrap()
    }

    fn codec(&self, kind: &str) -> Option<&str> {
        self.stream(kind).and_then(|stream| stream["codec_name"].as_str())
    }

    fn frames(&self) -> u64 {
        self.video()["nb_read_frames"].as_str().unwrap().parse().unwrap()
    }
}

/// Seconds at which the frames of a file are shown, and at which its sound begins.
fn times(path: &Path) -> (Vec<f64>, Option<f64>) {
    let number = |value: &Value| value.as_str().and_then(|text| text.parse::<f64>().ok());
    let told = probed(path, &["-select_streams", "v:0", "-show_entries", "packet=pts_time"]);
    let packets = told["packets"].as_array().unwrap().iter();
    let mut shown: Vec<f64> = packets.map(|packet| number(&packet["pts_time"]).unwrap()).collect();
    shown.sort_by(f64::total_cmp);
    (shown, Found::of(path).stream("audio").and_then(|sound| number(&sound["start_time"])))
}

const SOUND: [&str; 4] = ["-f", "lavfi", "-i", "sine=frequency=440:duration=2"];

/// Two seconds of video at 24 frames a second.
fn picture(size: &str) -> [String; 4] {
    ["-f", "lavfi", "-i", &format!("testsrc2=size={size}:rate=24:duration=2")].map(str::to_owned)
}

/// A clip with sound, made by ffmpeg with these words.
fn made(folder: &Folder, name: &str, words: &[&str]) -> PathBuf {
    let (path, video) = (folder.0.join(name), picture("64x48"));
    let video: Vec<&str> = video.iter().map(String::as_str).collect();
    ffmpeg(&[&video[..], &SOUND, words, &[text(&path)]].concat());
    path
}

const H264: [&str; 4] = ["-c:v", "libx264", "-c:a", "aac"];

/// Every size of a file at which writing may stop: the output is whole, or an error and the file that was there.
#[cfg(unix)]
#[test]
fn a_full_disk_is_an_error() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("video-full");
    let clip = folder.file("clip.y4m", &y4m(64, 48, 30));
    for name in ["out.mkv", "out.webm", "out.mov", "out.mp4", "out.jpg"] {
        let still = folder.file("still.y4m", &y4m(256, 256, 1));
        let (source, frames) = if name == "out.jpg" { (&still, 1) } else { (&clip, 30) };
        let (target, mut outcomes) = (folder.0.join(name), [0; 2]);
        for kibibytes in [1, 4, 9, 16, 40, 4000] {
            std::fs::write(&target, b"precious").unwrap();
            let mut command = Command::new("sh");
            // Writing beyond the limit fails, as on a full disk, instead of ending the program.
            let script = "trap '' XFSZ; ulimit -f $(($0 * 2)); exec \"$@\"";
            command.args(["-c", script, &kibibytes.to_string()]).arg(executable());
            command.args(["roundtrip", text(source), text(&target), "-y"]).env("VIDEO_VAE_WEIGHTS", small());
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            if output.status.success() {
                assert_eq!(Found::of(&target).frames(), frames, "{name} within {kibibytes} KiB");
            } else {
                assert_eq!(std::fs::read(&target).unwrap(), b"precious", "{name} within {kibibytes} KiB: {said}");
                assert!(said.contains(name) && said.contains("make room") && said.lines().count() == 1, "{said}");
            }
            outcomes[usize::from(output.status.success())] += 1;
        }
        assert!(outcomes[0] > 0 && outcomes[1] > 0, "{name}: {outcomes:?}");
    }
    assert!(!names(&folder.0).iter().any(|name| name.starts_with('.')), "{:?}", names(&folder.0));
}

/// Every n-th byte of a part of the file becomes another.
fn spoil(bytes: &mut [u8], part: std::ops::Range<usize>) {
    bytes[part].iter_mut().step_by(3).for_each(|byte| *byte = byte.wrapping_mul(167).wrapping_add(13));
}

#[test]
fn damaged_video_is_an_error_that_names_the_frame() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("video-damage");
    let target = folder.0.join("out.y4m");
    let refused = |clip: &Path| {
        let output = vvae(&["roundtrip", text(clip), text(&target)]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.lines().count() == 1, "{}: {said}", clip.display());
        assert!(said.contains("is damaged at frame ") && said.contains("--keep-damaged"), "{said}");
        assert!(!target.exists());
        let number = said.split_once("at frame ").unwrap().1.split(' ').next().unwrap();
        number.parse::<u64>().unwrap_or_else(|_| panic!("{said}"))
    };
    // The words of each, and whether its bytes can be spoilt.
    let quick = ["-c:v", "libx264", "-c:a", "aac", "-movflags", "+faststart"];
    let pieces = ["-c:v", "libx264", "-g", "6", "-c:a", "aac", "-movflags", "+frag_keyframe+empty_moov"];
    let avi = ["-c:v", "mpeg4", "-bf", "0", "-c:a", "mp3"];
    for (name, words) in [
        ("clip.mkv", &H264[..]),
        ("clip.mp4", &quick),
        ("pieces.mp4", &pieces),
        ("clip.avi", &avi),
        ("clip.webm", &["-c:v", "libvpx-vp9", "-c:a", "libopus"]),
    ] {
        let clip = made(&folder, name, words);
        let whole = std::fs::read(&clip).unwrap();
        let sound = warnings(&["roundtrip", text(&clip), text(&target), "-y"]);
        assert!(!sound.contains("damaged"), "{name}: {sound}");
        std::fs::remove_file(&target).unwrap();
        let cut = folder.file(&format!("cut-{name}"), &whole[..whole.len() * 6 / 10]);
        let frame = refused(&cut);
        assert!((10..40).contains(&frame), "{name}: frame {frame}");
        // What can be read is kept with a warning.
        let words = ["roundtrip", text(&cut), text(&target), "--keep-damaged"];
        let said = warnings(&words);
        assert!(said.contains("is damaged at frame ") && said.contains(" can be read and are kept"), "{name}: {said}");
        let kept = std::fs::read(&target).unwrap().windows(6).filter(|w| w == b"FRAME\n").count();
        assert!((10..40).contains(&kept), "{name}: {kept} frames");
        std::fs::remove_file(&target).unwrap();
    }
    let whole = std::fs::read(folder.0.join("clip.mp4")).unwrap();
    let mut bytes = whole.clone();
    spoil(&mut bytes, whole.len() / 2..whole.len() / 2 + 1000);
    let spoilt = folder.file("spoilt.mp4", &bytes);
    let frame = refused(&spoilt);
    assert!((10..40).contains(&frame), "frame {frame}");
    fails(&["encode", text(&spoilt), text(&folder.0.join("out.safetensors"))], &["is damaged at frame"]);
    fails(&["compare", text(&spoilt), text(&spoilt)], &["is damaged at frame"]);
    assert!(warnings(&["compare", text(&spoilt), text(&spoilt), "--keep-damaged"]).contains("is damaged at frame"));
}

#[test]
fn damaged_y4m_and_pictures_can_be_kept_in_part() {
    let folder = Folder::new("video-parts");
    let target = folder.0.join("out.raw");
    let bytes = y4m(16, 16, 5);
    let cut = folder.file("cut.y4m", &bytes[..bytes.len() - 100]);
    fails(&["roundtrip", text(&cut), text(&target)], &["cut short within frame 4", "--keep-damaged"]);
    let said = warnings(&["roundtrip", text(&cut), text(&target), "--keep-damaged"]);
    assert!(said.contains("cut short within frame 4; 4 frames before it are kept"), "{said}");
    assert_eq!(std::fs::metadata(&target).unwrap().len(), 4 * 16 * 16 * 3);
    let pictures = folder.0.join("pictures");
    succeeds(&["roundtrip", text(&folder.file("clip.y4m", &bytes)), text(&pictures)]);
    let third = pictures.join("frame-000003.png");
    let bytes = std::fs::read(&third).unwrap();
    std::fs::write(&third, &bytes[..bytes.len() / 2]).unwrap();
    fails(&["roundtrip", text(&pictures), text(&target), "-y"], &["frame-000003.png"]);
    let said = warnings(&["roundtrip", text(&pictures), text(&target), "-y", "--keep-damaged"]);
    assert!(said.contains("frame-000003.png") && said.contains("it is left out"), "{said}");
    assert_eq!(std::fs::metadata(&target).unwrap().len(), 4 * 16 * 16 * 3);
}

/// 24 frames with a hole of a second among them, 30 to a second in nominal terms, and sound of the whole length.
fn uneven(folder: &Folder, name: &str) -> PathBuf {
    let path = folder.0.join(name);
    let video = ["-f", "lavfi", "-i", "testsrc2=size=64x48:rate=30:duration=1.9333"];
    let filter = ["-vf", "select=lt(n\\,12)+gte(n\\,46)", "-vsync", "passthrough", "-bf", "0"];
    ffmpeg(&[&video[..], &SOUND, &filter, &H264, &["-t", "1.9333", text(&path)]].concat());
    assert_eq!(times(&path).0.len(), 24);
    path
}

/// A second of video that begins half a second after the sound.
fn late(folder: &Folder, name: &str) -> PathBuf {
    let path = folder.0.join(name);
    let video = ["-f", "lavfi", "-i", "testsrc2=size=64x48:rate=24:duration=1"];
    let filter = ["-vf", "setpts=PTS+0.5/TB", "-vsync", "passthrough"];
    ffmpeg(&[&video[..], &SOUND, &filter, &H264, &["-t", "1.5", text(&path)]].concat());
    path
}

/// Frames are shown as long after the start of the sound, or of the clip, as in the source.
#[track_caller]
fn same_times(source: &Path, result: &Path, with_sound: bool) {
    let ((before, sound), (after, kept)) = (times(source), times(result));
    assert_eq!(before.len(), after.len(), "{}", result.display());
    assert_eq!(kept.is_some(), with_sound);
    let zero = |sound: Option<f64>| if with_sound { sound.unwrap() } else { 0.0 };
    for (frame, (a, b)) in before.iter().zip(&after).enumerate() {
        let (a, b) = (a - zero(sound), b - zero(kept));
        // Matroska has milliseconds, and a start of its own for some sound.
        let tolerance = if with_sound { 0.03 } else { 0.002 };
        assert!((a - b).abs() < tolerance, "{}: frame {frame} at {a} s, now at {b} s", result.display());
    }
    let steps = |times: &[f64]| times.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>();
    let uneven = steps(&before).into_iter().zip(steps(&after)).find(|(a, b)| (a - b).abs() > 0.0025);
    assert!(uneven.is_none(), "{}: {uneven:?}", result.display());
}

#[test]
fn frames_keep_their_times() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("video-times");
    let path = |name: &str| folder.0.join(name);
    for clip in [
        uneven(&folder, "uneven.mp4"),
        uneven(&folder, "uneven.mkv"),
        late(&folder, "late.mp4"),
        late(&folder, "late.mkv"),
        late(&folder, "late.ts"),
    ] {
        let is_mp4 = clip.extension().unwrap() == "mp4";
        for name in ["back.mkv", "back.mp4", "back.mov", "back.webm"].iter().take(if is_mp4 { 4 } else { 1 }) {
            let back = path(name);
            let said = warnings(&["roundtrip", text(&clip), text(&back), "-y"]);
            assert!(!said.contains("dropped"), "{said}");
            same_times(&clip, &back, true);
        }
        if !is_mp4 {
            continue;
        }
        // Through a file of latents, and a range of it, which begins at zero.
        let (latent, again) = (path("latent.safetensors"), path("again.mkv"));
        succeeds(&["encode", text(&clip), text(&latent), "-y"]);
        succeeds(&["decode", text(&latent), text(&again), "-y"]);
        same_times(&clip, &again, false);
        succeeds(&["decode", text(&latent), text(&again), "-y", "--frames", "8:20"]);
        let ((all, _), (part, _)) = (times(&clip), times(&again));
        assert_eq!(part.len(), 12);
        assert!(all[8..20].iter().zip(&part).all(|(a, b)| (a - all[8] - b).abs() < 0.002), "{part:?}");
    }
    // The length of the stream, not only its packets.
    succeeds(&["roundtrip", text(&path("uneven.mp4")), text(&path("back.mp4")), "-y"]);
    let length = Found::of(&path("back.mp4")).video()["duration"].as_str().unwrap().parse::<f64>().unwrap();
    assert!((length - 1.933).abs() < 0.01, "{length}");
}

/// An exact rate stays exact, although Matroska rounds times.
#[test]
fn a_constant_rate_stays_exact() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("video-rate");
    let (clip, back) = (folder.0.join("clip.mkv"), folder.0.join("back.mp4"));
    let video = ["-f", "lavfi", "-i", "testsrc2=size=64x48:rate=30000/1001:duration=2"];
    ffmpeg(&[&video[..], &["-c:v", "libx264", text(&clip)]].concat());
    let said = warnings(&["roundtrip", text(&clip), text(&back)]);
    assert_eq!(said, "");
    let found = Found::of(&back);
    let rates = ["r_frame_rate", "avg_frame_rate"].map(|key| found.video()[key].as_str().unwrap().to_owned());
    assert_eq!((rates, found.frames()), (["30000/1001"; 2].map(str::to_owned), 60));
    let latent = folder.0.join("latent.safetensors");
    succeeds(&["encode", text(&clip), text(&latent)]);
    let bytes = std::fs::read(&latent).unwrap();
    let json = String::from_utf8_lossy(&bytes[8..4096]);
    assert!(json.contains("\"fps\":\"30000/1001\"") && !json.contains("times"), "a rate needs no times: {json}");
}

/// A format of one rate repeats frames, and says so; one without times says that.
#[test]
fn repeated_and_dropped_frames_are_counted() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("video-steady");
    let path = |name: &str| folder.0.join(name);
    let clip = uneven(&folder, "uneven.mp4");
    let said = warnings(&["roundtrip", text(&clip), text(&path("back.y4m"))]);
    assert!(said.contains("34 frames duplicated and 0 dropped to keep to 30/1 frames a second"), "{said}");
    let count = |path: &Path| std::fs::read(path).unwrap().windows(6).filter(|w| w == b"FRAME\n").count();
    assert_eq!(count(&path("back.y4m")), 58);
    let said = warnings(&["roundtrip", text(&clip), text(&path("back.raw"))]);
    assert!(said.contains("does not hold sound (aac), the times of frames"), "{said}");
    assert_eq!(std::fs::metadata(path("back.raw")).unwrap().len(), 24 * 64 * 48 * 3);
    // What the user asks for is counted too, and sound and picture stay together.
    let said = warnings(&["roundtrip", text(&clip), text(&path("back.mp4")), "--fps", "15"]);
    assert!(said.contains("duplicated and ") && said.contains("dropped to keep to 15/1 frames a second"), "{said}");
    let (shown, _) = times(&path("back.mp4"));
    let last = shown.last().unwrap();
    assert!((shown.len() as i64 - 29).abs() <= 1 && (last - 1.9).abs() < 0.07, "{shown:?}");
    let said = warnings(&["roundtrip", text(&late(&folder, "late.mp4")), text(&path("late.y4m"))]);
    assert!(
        said.contains("does not hold sound (aac), the start at 0.500 s") && count(&path("late.y4m")) == 24,
        "{said}"
    );
    let quiet = vvae(&["roundtrip", text(&clip), text(&path("back.y4m")), "-y", "-q"]).output().unwrap();
    assert!(quiet.status.success() && quiet.stderr.is_empty());
}

/// A clip of everything: pixels that are not square, alpha, subtitles, a title, chapters, an attachment, sound in FLAC.
fn rich(folder: &Folder) -> PathBuf {
    let subtitles = folder.file("lines.srt", b"1\n00:00:00,100 --> 00:00:01,500\nHello\n\n");
    let chapter = |at: u32| format!("[CHAPTER]\nTIMEBASE=1/1000\nSTART={at}\nEND={}\ntitle=Part\n", at + 1000);
    let told = format!(";FFMETADATA1\ntitle=A clip of everything\n{}{}", chapter(0), chapter(1000));
    let told = folder.file("told.txt", told.as_bytes());
    let inputs = ["-i", text(&subtitles), "-i", text(&told), "-map", "0", "-map", "1", "-map", "2"];
    let metadata = ["-map_metadata", "3", "-map_chapters", "3"];
    let codecs = ["-vf", "format=yuva420p,setsar=16/11", "-c:v", "ffv1", "-c:a", "flac", "-c:s", "srt"];
    let attached = ["-attach", text(&subtitles), "-metadata:s:t", "mimetype=text/plain"];
    made(folder, "rich.mkv", &[&inputs[..], &metadata, &codecs, &attached].concat())
}

#[test]
fn what_a_file_has_beside_pictures_is_kept_or_told() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("video-extras");
    let clip = rich(&folder);
    let changed = |name: &str, codec: &str| format!("sound: .{name} holds no flac, so it is written as {codec}");
    for (name, sound, subtitles, lost, changed) in [
        ("mkv", "flac", "subrip", "does not hold alpha\n", None),
        ("mp4", "aac", "mov_text", "does not hold alpha, 1 attachment\n", Some(changed("mp4", "aac"))),
        ("mov", "aac", "mov_text", "does not hold alpha, 1 attachment\n", Some(changed("mov", "aac"))),
        ("webm", "opus", "webvtt", "does not hold alpha, 1 attachment\n", Some(changed("webm", "opus"))),
    ] {
        let back = folder.0.join(format!("back.{name}"));
        let said = warnings(&["roundtrip", text(&clip), text(&back)]);
        assert!(said.contains(lost), "{name}: {said}");
        assert!(changed.is_none_or(|changed| said.contains(&changed)), "{name}: {said}");
        let found = Found::of(&back);
        assert_eq!((found.codec("audio"), found.codec("subtitle")), (Some(sound), Some(subtitles)), "{name}");
        assert_eq!(found.0["format"]["tags"]["title"], "A clip of everything", "{name}");
        assert_eq!(found.0["chapters"].as_array().unwrap().len(), 2, "{name}");
        // WebM keeps a width in whole pixels.
        let aspect = if name == "webm" { "93:64" } else { "16:11" };
        assert_eq!(found.video()["sample_aspect_ratio"], aspect, "{name}");
        assert_eq!(found.stream("attachment").is_some(), name == "mkv");
    }
    let all = "does not hold alpha, sound (flac), subtitles (subrip), the title, 1 attachment, 2 chapters";
    let y4m = folder.0.join("back.y4m");
    assert!(warnings(&["roundtrip", text(&clip), text(&y4m)]).contains(&format!("{all}\n")));
    assert!(header(&y4m).contains(" A16:11 "), "{}", header(&y4m));
    let said = warnings(&["roundtrip", text(&clip), text(&folder.0.join("back.raw"))]);
    assert!(said.contains(&format!("{all}, the pixel aspect ratio (16:11)\n")), "{said}");

    // Latents keep what is of pictures, and the title. So do y4m and PNG with the aspect ratio.
    let (latent, back) = (folder.0.join("latent.safetensors"), folder.0.join("again.mp4"));
    let said = warnings(&["encode", text(&clip), text(&latent)]);
    assert!(
        said.contains("does not hold alpha, sound (flac), subtitles (subrip), 1 attachment, 2 chapters\n"),
        "{said}"
    );
    assert_eq!(warnings(&["decode", text(&latent), text(&back)]), "");
    let found = Found::of(&back);
    assert_eq!(found.0["format"]["tags"]["title"], "A clip of everything");
    assert_eq!(found.video()["sample_aspect_ratio"], "16:11");
    let (pictures, again) = (folder.0.join("pictures"), folder.0.join("again.y4m"));
    succeeds(&["decode", text(&latent), text(&pictures)]);
    succeeds(&["roundtrip", text(&pictures), text(&again)]);
    assert!(header(&again).contains(" A16:11 "), "{}", header(&again));
}

#[test]
fn hdr_metadata_is_kept_or_told() {
    if !tool("ffmpeg") || !tool("ffprobe") {
        return;
    }
    let folder = Folder::new("video-hdr");
    let display = "G(13250,34500)B(7500,3000)R(34000,16000)WP(15635,16450)L(10000000,50)";
    let settings = format!("log-level=error:master-display={display}:max-cll=1000,400");
    let tags = ["-color_primaries", "bt2020", "-color_trc", "smpte2084", "-colorspace", "bt2020nc"];
    let words = ["-vf", "format=yuv420p10le", "-c:v", "libx265", "-x265-params", &settings, "-an"];
    // ffmpeg writes it into the stream alone, so it is found with the first frame only.
    let clip = made(&folder, "hdr.mp4", &[&words[..], &tags].concat());
    let latent = folder.0.join("latent.safetensors");
    succeeds(&["encode", text(&clip), text(&latent)]);
    let check = |path: &Path| {
        let found = Found::of(path);
        let data = found.video()["side_data_list"].as_array().cloned().unwrap_or_default();
        let of = |kind: &str| data.iter().find(|data| data["side_data_type"] == kind).unwrap_or(&Value::Null).clone();
        let (mastering, light) = (of("Mastering display metadata"), of("Content light level metadata"));
        let number = |key: &str| {
            let (above, below) =
                mastering[key].as_str().unwrap_or_else(|| panic!("{path:?}: {data:?}")).split_once('/').unwrap();
            above.parse::<f64>().unwrap() / below.parse::<f64>().unwrap()
        };
        for (key, value) in [("red_x", 0.68), ("green_y", 0.69), ("blue_x", 0.15), ("white_point_y", 0.329)] {
            assert!((number(key) - value).abs() < 1e-4, "{path:?}: {key} {}", number(key));
        }
        assert!((number("max_luminance") - 1000.0).abs() < 0.1 && (number("min_luminance") - 0.005).abs() < 1e-5);
        assert_eq!((&light["max_content"], &light["max_average"]), (&1000.into(), &400.into()), "{path:?}");
    };
    for name in ["back.mp4", "back.mov", "back.mkv", "back.webm"] {
        let back = folder.0.join(name);
        assert_eq!(warnings(&["roundtrip", text(&clip), text(&back)]), "");
        check(&back);
        succeeds(&["decode", text(&latent), text(&back), "-y"]);
        check(&back);
    }
    let said = warnings(&["roundtrip", text(&clip), text(&folder.0.join("back.y4m"))]);
    assert!(said.contains("does not hold colour tags (bt2020, smpte2084), HDR metadata\n"), "{said}");
}

/// Alpha of pictures is not passed over in silence either.
#[test]
fn alpha_of_pictures_is_told() {
    if !tool("ffmpeg") {
        return;
    }
    let folder = Folder::new("video-alpha");
    let (picture, back) = (folder.0.join("picture.png"), folder.0.join("back.png"));
    let source = ["-f", "lavfi", "-i", "color=red@0.5:size=32x32,format=rgba", "-frames:v", "1"];
    ffmpeg(&[&source[..], &[text(&picture)]].concat());
    assert!(warnings(&["roundtrip", text(&picture), text(&back)]).contains("back.png does not hold alpha\n"));
}

/// Times in a file of latents are checked like all else in it.
#[test]
fn forged_times_are_an_error() {
    let folder = Folder::new("video-forged");
    let (latent, target) = (folder.0.join("latent.safetensors"), folder.0.join("out.y4m"));
    let forged = |times: &[i64], base: &str| {
        let values = 16 * 2 * 2 * 4;
        let latents = serde_json::json!({ "dtype": "F32", "shape": [1, 16, 1, 2, 2], "data_offsets": [0, values] });
        let end = values + 8 * times.len();
        let listed = serde_json::json!({ "dtype": "I64", "shape": [times.len()], "data_offsets": [values, end] });
        let json = serde_json::json!({ "__metadata__": { "time_base": base }, "latent": latents, "times": listed });
        let json = json.to_string();
        let times: Vec<u8> = times.iter().flat_map(|time| time.to_le_bytes()).collect();
        let bytes = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![0; values], &times].concat();
        std::fs::write(&latent, bytes).unwrap();
    };
    let decode = ["decode", text(&latent), text(&target), "-y"];
    forged(&[0], "1/1000");
    succeeds(&decode);
    for (times, base, said) in [
        (&[0, 1][..], "1/1000", "2 numbers for 1 frame"),
        (&[], "1/1000", "0 numbers for 1 frame"),
        (&[i64::MIN], "1/1000", "times do not rise"),
        (&[0], "0/0", "time_base"),
        (&[0], "1/99999999999999", "time_base"),
        (&[5, 5], "1/1000", "times do not rise"),
    ] {
        forged(times, base);
        fails(&decode, &[said]);
    }
}
