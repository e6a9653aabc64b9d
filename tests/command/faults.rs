//! The `vvae` command against hostile files and hosts: its own source as the output, terminal escapes, killed runs,
//! sizes that no memory holds.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::command::{fails, names, out, succeeds, text, vvae, y4m};
use crate::common::safetensors::{Folder, Tensor, Tensors, to_bytes};
use crate::common::small;

/// By any name: its own, another path, a symbolic link, a hard link.
#[cfg(unix)]
#[test]
fn an_output_is_never_the_input() {
    let folder = Folder::new("faults-source");
    let at = |name: &str| folder.0.join(name);
    let bytes = y4m(16, 16, 3);
    let clip = folder.file("clip.y4m", &bytes);
    std::os::unix::fs::symlink("clip.y4m", at("soft.y4m")).unwrap();
    std::fs::hard_link(&clip, at("hard.y4m")).unwrap();
    let dotted = folder.0.join(".").join("clip.y4m");
    let before = names(&folder.0);
    for target in [&clip, &dotted, &at("soft.y4m"), &at("hard.y4m")] {
        fails(&["roundtrip", text(&clip), text(target), "-y"], &["the same file as the input", "name another"]);
    }
    assert_eq!(std::fs::read(&clip).unwrap(), bytes);
    assert_eq!(names(&folder.0), before);
    // Standard input, the weights, latents and pictures are inputs too.
    let script = "exec \"$0\" roundtrip - \"$1\" -y < \"$1\"";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(crate::common::command::executable()).arg(&clip).env("VIDEO_VAE_WEIGHTS", small());
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(said.contains("the same file as the input") && std::fs::read(&clip).unwrap() == bytes, "{said}");
    let weights = at("weights.safetensors");
    std::fs::copy(small(), &weights).unwrap();
    let words = ["encode", text(&clip), text(&weights), "-y", "--weights", text(&weights)];
    fails(&words, &["weights.safetensors is the same file"]);
    let (latent, pictures) = (at("latent.safetensors"), at("pictures"));
    succeeds(&["encode", text(&clip), text(&latent)]);
    fails(&["decode", text(&latent), text(&latent), "-y"], &["latent.safetensors is the same file"]);
    succeeds(&["decode", text(&latent), text(&pictures)]);
    let first = pictures.join("frame-000001.png");
    fails(&["compare", text(&pictures), text(&pictures), "--sheet", text(&first), "-y"], &["is the same file"]);
}

/// Traces, figures and pictures are outputs like any other: none of them replaces what the run reads.
#[test]
fn no_output_of_any_option_is_an_input() {
    let folder = Folder::new("faults-sources");
    let bytes = y4m(16, 16, 3);
    let (clip, latent) = (folder.file("clip.y4m", &bytes), folder.0.join("latent.safetensors"));
    let weights = folder.0.join("weights.safetensors");
    std::fs::copy(small(), &weights).unwrap();
    let whole = std::fs::read(&weights).unwrap();
    let (clip, latent, weights) = (text(&clip), text(&latent), text(&weights));
    let trace = |target: &str| format!("trace={target}");
    for words in [&["--set", &trace(clip)][..], &["--trace", clip], &["--trace", clip, "-y"]] {
        fails(&[&["encode", clip, latent], words].concat(), &["clip.y4m", "the same file as the input"]);
    }
    let to_weights = trace(weights);
    for words in [
        &["encode", clip, latent, "--weights", weights, "--set", &to_weights, "-y"][..],
        &["info", weights, "--json", weights, "-y"],
        &["plan", "--decode", "1x16x16", "--weights", weights, "--json", weights, "-y"],
        &["plan", "--decode", "1x16x16", "--weights", weights, "--device-like", "a100", "--json", weights, "-y"],
        &["plan", "--decode", "1x16x16", "--weights", weights, "--device-like", "a100", "--picture", weights, "-y"],
    ] {
        fails(words, &["weights.safetensors is the same file as the input"]);
    }
    let variant = format!("precision=fp32,{}", trace(clip));
    fails(&["compare", clip, "--variant", &variant, "-y"], &["the same file as the input"]);
    assert!(std::fs::read(clip).unwrap() == bytes && std::fs::read(weights).unwrap() == whole);
    assert_eq!(names(&folder.0), ["clip.y4m", "weights.safetensors"]);
}

/// Two outputs of one name: refused before anything runs, and what has the name stays.
#[test]
fn no_name_is_written_twice() {
    let folder = Folder::new("faults-twice");
    let clip = folder.file("clip.y4m", &y4m(16, 16, 3));
    let (new, old) = (folder.0.join("new.y4m"), folder.file("old.y4m", b"precious"));
    let dotted = folder.0.join(".").join("new.y4m");
    let (clip, new, old, dotted) = (text(&clip), text(&new), text(&old), text(&dotted));
    let trace = format!("trace={new}");
    for words in [
        &["roundtrip", clip, new, "--trace", dotted][..],
        &["roundtrip", clip, old, "--trace", old, "-y"],
        &["roundtrip", clip, old, "--report", old, "-y"],
        &["encode", clip, "latent.safetensors", "--trace", "latent.safetensors"],
        &["plan", "--decode", "1x16x16", "--json", new, "--picture", dotted],
        &["compare", clip, clip, "--sheet", new, "--report", new],
        &["compare", clip, "--variant", &trace, "--variant", &trace],
    ] {
        fails(words, &["the name of two outputs", "its own"]);
    }
    fails(&["bench", "--trace", new, "--device", "cpu", "--shapes", "1x16x16"], &["--trace", "every case"]);
    fails(&["compare", clip, "--set", &trace], &["--trace", "--variant"]);
    assert_eq!(std::fs::read(old).unwrap(), b"precious");
    assert_eq!(names(&folder.0), ["clip.y4m", "old.y4m"]);
}

/// Pictures of a pattern: none gets its name unless all can, and what is no regular file stays.
#[cfg(unix)]
#[test]
fn pictures_of_a_pattern_get_their_names_together() {
    let folder = Folder::new("faults-pattern");
    let clip = folder.file("clip.y4m", &y4m(16, 16, 4));
    let (pattern, second) = (folder.0.join("f%04d.png"), folder.0.join("f0002.png"));
    let words = ["roundtrip", text(&clip), text(&pattern)];
    let refused = |why: &[&str], more: &[&str]| {
        let before = names(&folder.0);
        fails(&[&words[..], more].concat(), why);
        assert_eq!(names(&folder.0), before);
    };
    assert!(Command::new("mkfifo").arg(&second).status().unwrap().success());
    refused(&["f0002.png exists and is not a regular file"], &["-y"]);
    refused(&["f0002.png exists and is not a regular file"], &[]);
    std::fs::remove_file(&second).unwrap();
    std::os::unix::fs::symlink("nowhere.png", &second).unwrap();
    refused(&["f0002.png exists and is not a regular file"], &["-y"]);
    std::fs::remove_file(&second).unwrap();
    // A gap before and after it.
    folder.file("f0002.png", b"precious");
    folder.file("f0004.png", b"precious");
    refused(&["f0002.png exists", "-y"], &[]);
    std::fs::remove_file(folder.0.join("f0004.png")).unwrap();
    std::fs::create_dir(folder.0.join("f0004.png")).unwrap();
    refused(&["f0004.png exists and is not a regular file"], &["-y"]);
    std::fs::remove_dir(folder.0.join("f0004.png")).unwrap();
    assert_eq!(std::fs::read(&second).unwrap(), b"precious");
    // Other outputs have names, too.
    refused(&["f0003.png is the name of two outputs"], &["-y", "--trace", text(&folder.0.join("f0003.png"))]);
    // Pictures of a longer clip before stay.
    folder.file("f0005.png", b"older");
    succeeds(&[&words[..], &["-y"]].concat());
    assert_eq!(std::fs::read(folder.0.join("f0005.png")).unwrap(), b"older");
    // A folder that cannot be written is not the fault of a name that nobody gave.
    let nowhere = folder.0.join("nowhere").join("f%03d.png");
    fails(&["roundtrip", text(&clip), text(&nowhere)], &["nowhere does not exist"]);
}

/// Parts without a frame, and numbers that no clip has: an error of one line, and no file.
#[test]
fn parts_without_frames_and_huge_numbers_are_an_error() {
    let folder = Folder::new("faults-parts");
    let (clip, latent) = (folder.file("clip.y4m", &y4m(16, 16, 5)), folder.0.join("latent.safetensors"));
    let good = folder.file("good.y4m", b"precious");
    let (clip, latent, good) = (text(&clip), text(&latent), text(&good));
    succeeds(&["encode", clip, latent]);
    let before = names(&folder.0);
    for part in [&["-ss", "0.11", "-t", "0.001"][..], &["-t", "0"]] {
        fails(&[&["decode", latent, good, "-y"], part].concat(), &["no frame in the part asked for", "longer -t"]);
        fails(&[&["roundtrip", clip, good, "-y"], part].concat(), &["no frame in the part asked for", "longer -t"]);
    }
    for text in ["1e300", "1e308:0"] {
        fails(&["decode", latent, good, "-y", "-ss", text], &[text, "later than any clip"]);
    }
    fails(&["decode", latent, good, "-y", "-ss", "1e9"], &["name an earlier part"]);
    for frames in ["18446744073709551615", "18446744073709551615:", "9223372036854775807:", "99:18446744073709551615"] {
        fails(&["decode", latent, good, "-y", "--frames", frames], &["name an earlier part"]);
        fails(&["encode", clip, latent, "-y", "--frames", frames], &["name an earlier part"]);
    }
    for frames in ["18446744073709551615:", "99:"] {
        fails(&["roundtrip", clip, good, "-y", "--frames", frames], &["has 5 frames", "name an earlier one"]);
        fails(&["compare", clip, "--frames", frames], &["no frames from frame"]);
    }
    for size in ["18446744073709551615x64x64", "1x18446744073709551615x64", "4294967297x8x8", "1x8x131073"] {
        fails(&["plan", "--decode", size], &[size, "give less"]);
        fails(&["plan", "--encode", size], &[size, "give less"]);
    }
    for name in ["f%099999d.png", "f%021d.png"] {
        let pictures = folder.0.join(name);
        fails(&["decode", latent, text(&pictures)], &["one picture"]);
        fails(&["roundtrip", text(&pictures), good, "-y"], &["does not exist"]);
    }
    assert_eq!(std::fs::read(good).unwrap(), b"precious");
    assert_eq!(names(&folder.0), before);
}

/// What the library warns of is told once. -q keeps quiet.
#[test]
fn warnings_of_the_library_are_told() {
    let folder = Folder::new("faults-warnings");
    let latent = Tensor { shape: vec![1, 16, 1, 2, 2], values: vec![f32::NAN; 64] };
    let latent = folder.file("latent.safetensors", &to_bytes(&Tensors::from([("latent".into(), latent)]), 1));
    let (latent, clip) = (text(&latent), folder.0.join("clip.y4m"));
    let words = ["decode", latent, text(&clip), "-y", "--device", "cpu"];
    let told = |more: &[&str]| {
        let output = vvae(&[&words[..], more].concat()).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = told(&[]);
    assert!(said.starts_with("vvae: ") && said.contains("NaN") && said.lines().count() == 1, "{said}");
    let said = told(&["--set", "slice_frames=4096"]);
    assert!(said.contains("slice_frames: 4096 is more than a slice can have"), "{said}");
    assert_eq!(told(&["-q"]), "");
    // A failure is told once.
    fails(&[&words[..], &["--set", "nonfinite=error"]].concat(), &["NaN"]);
}

/// What a file says is shown, and does not rule the terminal.
#[test]
fn control_characters_of_files_are_shown() {
    let folder = Folder::new("faults-escapes");
    let escape = "\x1b]0;owned\x07\x1b[2J\u{9b}1m";
    let header = format!("YUV4MPEG2 W16 H16 F24:1 Ip C{escape}\n");
    let clip = folder.file("clip.y4m", header.as_bytes());
    let harmless = |bytes: &[u8]| {
        let said = String::from_utf8(bytes.to_vec()).unwrap();
        assert!(said.contains("\\u{1b}") && !said.chars().any(|c| c.is_control() && c != '\n'), "{said:?}");
    };
    harmless(&vvae(&["roundtrip", text(&clip), "out.y4m"]).output().unwrap().stderr);
    // Reports name their files, whose names may be of any characters.
    #[cfg(unix)]
    {
        let named = folder.file("a\x1b[31m.y4m", &y4m(16, 16, 1));
        let target = folder.0.join("b\x1b[32m.y4m");
        let output = vvae(&["roundtrip", text(&named), text(&target)]).output().unwrap();
        assert!(output.status.success() && target.exists());
        harmless(&output.stdout);
        harmless(&vvae(&["info", text(&named)]).output().unwrap().stderr);
    }
    let latent = "{\"__metadata__\":{},\"a\\u001b[2J\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    let bytes = [&(latent.len() as u64).to_le_bytes()[..], latent.as_bytes(), &[0; 4]].concat();
    let video = folder.file("video.safetensors", &bytes);
    harmless(&vvae(&["roundtrip", text(&video), "out.y4m"]).output().unwrap().stderr);
}

fn is_draft(name: &str) -> bool {
    name.starts_with(".part-")
}

/// Killed when dropped, with no chance to clean up.
struct Run(std::process::Child);

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a run that takes long, and waits until it writes.
#[cfg(unix)]
fn begun(folder: &Folder, clip: &Path, target: &Path) -> (Run, String) {
    let known = names(&folder.0);
    let mut run = Run(vvae(&["roundtrip", text(clip), text(target)]).spawn().expect("it starts"));
    let started = Instant::now();
    loop {
        if let Some(draft) = names(&folder.0).into_iter().find(|name| is_draft(name) && !known.contains(name)) {
            return (run, draft);
        }
        let running = run.0.try_wait().unwrap().is_none() && started.elapsed() < Duration::from_secs(120);
        assert!(running, "it did not start");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A run that was killed leaves its draft, a file or a folder. The next one of the same output removes it, but not that
/// of a run that goes on.
#[cfg(unix)]
#[test]
fn drafts_of_killed_runs_are_removed_by_the_next() {
    let folder = Folder::new("faults-killed");
    let (long, short) = (folder.file("long.y4m", &y4m(256, 256, 400)), folder.file("short.y4m", &y4m(16, 16, 1)));
    for target in ["out.y4m", "pictures"].map(|name| folder.0.join(name)) {
        let (killed, left) = begun(&folder, &long, &target);
        drop(killed);
        assert!(names(&folder.0).contains(&left), "a killed run cannot clean up");
        let other = folder.file(".part-0123456789abcdef-other.y4m", b"of another output");
        let (living, held) = begun(&folder, &long, &target);
        succeeds(&["roundtrip", text(&short), text(&target)]);
        let found = names(&folder.0);
        assert!(!found.contains(&left) && found.contains(&held) && other.exists(), "{found:?}");
        drop(living);
        std::fs::remove_file(&other).unwrap();
    }
    // Without a word about it, and for -y too.
    let output = vvae(&["roundtrip", text(&short), text(&folder.0.join("out.y4m")), "-y"]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", out(&output));
    let drafts: Vec<_> = names(&folder.0).into_iter().filter(|name| is_draft(name)).collect();
    assert!(drafts.iter().all(|name| name.ends_with("-pictures")), "{drafts:?}");
}

/// Runs it with so much address space, or all there is, and asserts a failure of one line.
#[cfg(unix)]
#[track_caller]
fn fails_within(kibibytes: Option<u64>, words: &[&str]) -> String {
    let limit = kibibytes.map_or("unlimited".into(), |limit| limit.to_string());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v \"$0\"; exec \"$@\"", &limit]).arg(crate::common::command::executable()).args(words);
    let output = command.env("VIDEO_VAE_WEIGHTS", small()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{words:?} within {limit}: {said}");
    assert!(said.starts_with("vvae: ") && said.lines().count() == 1, "{said}");
    said
}

/// A file without its bytes on the disk.
#[cfg(unix)]
fn sparse(folder: &Folder, name: &str, start: &[u8], length: u64) -> std::path::PathBuf {
    let path = folder.file(name, start);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
    path
}

/// Files that claim sizes which no memory holds: an error, with a limit and without one, and no file left behind.
#[cfg(unix)]
#[test]
fn sizes_beyond_memory_are_an_error() {
    let folder = Folder::new("faults-sizes");
    let target = |name: &str| folder.0.join(name);
    let some = Some(4 << 20);
    let header = folder.file("header.y4m", b"YUV4MPEG2 W131072 H131072 F24:1 Ip C420\n");
    for limit in [some, None] {
        for output in ["out.y4m", "out.png", "out.raw", "pictures/"] {
            fails_within(limit, &["roundtrip", text(&header), text(&target(output))]);
        }
        fails_within(limit, &["encode", text(&header), text(&target("out.safetensors"))]);
        fails_within(limit, &["compare", text(&header), text(&header)]);
    }
    let said = fails_within(some, &["roundtrip", text(&header), text(&target("out.y4m"))]);
    assert!(said.contains("header.y4m") && said.contains("131072x131072") && said.contains("GiB of memory"), "{said}");

    let shape = [1u64, 16, 1, 16384, 16384];
    let bytes = shape.iter().product::<u64>() * 4;
    let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [0, bytes] });
    let json = serde_json::json!({ "latent": entry }).to_string();
    let start = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    let latent = sparse(&folder, "latent.safetensors", &start, start.len() as u64 + bytes);
    for output in ["out.y4m", "out.png", "out.raw", "video.safetensors"] {
        fails_within(some, &["decode", text(&latent), text(&target(output))]);
    }

    // Frames that memory holds, but not what comparing them takes.
    let start = b"YUV4MPEG2 W12288 H8192 F24:1 Ip C420\nFRAME\n";
    let wide = sparse(&folder, "wide.y4m", start, start.len() as u64 + 12288 * 8192 * 3 / 2);
    let said = fails_within(some, &["compare", text(&wide), text(&wide), "--sheet", text(&target("sheet.png"))]);
    assert!(said.contains("12288x8192"), "{said}");
    assert_eq!(names(&folder.0), ["header.y4m", "latent.safetensors", "wide.y4m"]);
}
