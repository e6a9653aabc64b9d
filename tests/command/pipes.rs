//! The `vvae` command between pipes: `-` is standard input and output.

use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use crate::common::command::{succeeds, text, vvae, y4m};
use crate::common::safetensors::{Folder, read};

/// Runs it with these bytes as its standard input.
fn piped(words: &[&str], input: &[u8]) -> Output {
    let mut command = vvae(words);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // From a thread: both pipes may be full.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

#[track_caller]
fn pipes(words: &[&str], input: &[u8]) -> Vec<u8> {
    let output = piped(words, input);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {said}");
    assert!(said.contains("-: ") && said.contains(" frames"), "the report goes to standard error: {said}");
    output.stdout
}

fn bytes(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn y4m_through_pipes_has_the_bytes_of_files() {
    let folder = Folder::new("pipes-y4m");
    let path = |name: &str| folder.0.join(name);
    for frames in [7, 30] {
        let input = y4m(50, 38, frames);
        let clip = folder.file("clip.y4m", &input);
        succeeds(&["roundtrip", text(&clip), text(&path("back.y4m")), "-y"]);
        assert!(pipes(&["roundtrip", "-", "-"], &input) == bytes(&path("back.y4m")), "{frames} frames");
        // Quiet: nothing but the video.
        let quiet = piped(&["roundtrip", "-", "-", "-q"], &input);
        assert!(quiet.status.success() && quiet.stderr.is_empty() && quiet.stdout == bytes(&path("back.y4m")));
        // Raw RGB out, and in again with its size.
        succeeds(&["roundtrip", text(&clip), text(&path("back.raw")), "-y"]);
        let raw = pipes(&["roundtrip", "-", "-", "--format", "rgb"], &input);
        assert!(raw == bytes(&path("back.raw")) && raw.len() == frames * 50 * 38 * 3);
        succeeds(&["roundtrip", text(&path("back.raw")), text(&path("twice.raw")), "--size", "50x38", "-y"]);
        let twice = pipes(&["roundtrip", "-", "-", "--size", "50x38", "-f", "rgb"], &raw);
        assert!(twice == bytes(&path("twice.raw")));
    }
}

#[test]
fn latents_through_pipes() {
    let folder = Folder::new("pipes-latents");
    let path = |name: &str| folder.0.join(name);
    let input = y4m(50, 38, 21);
    let clip = folder.file("clip.y4m", &input);
    let (latent, video) = (path("latent.safetensors"), path("video.y4m"));
    succeeds(&["encode", text(&clip), text(&latent)]);
    let piped_latent = folder.file("piped.safetensors", &pipes(&["encode", "-", "-"], &input));
    assert_eq!(read(&latent)["latent"], read(&piped_latent)["latent"]);
    succeeds(&["decode", text(&latent), text(&video)]);
    assert!(pipes(&["decode", "-", "-"], &bytes(&piped_latent)) == bytes(&video));
    let numbers = pipes(&["decode", "-", "-", "-f", "safetensors"], &bytes(&latent));
    let numbers = folder.file("numbers.safetensors", &numbers);
    assert_eq!(read(&numbers)["video"].shape, [1, 3, 21, 38, 50]);
}

#[test]
fn what_is_no_video_is_an_error() {
    let told = |words: &[&str], input: &[u8]| {
        let output = piped(words, input);
        assert!(!output.status.success() && output.stdout.is_empty(), "{words:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = told(&["roundtrip", "-", "-"], b"nothing");
    assert!(said.contains("standard input"), "{said}");
    let said = told(&["roundtrip", "-", "-", "--size", "16x16", "-f", "rgb"], &[0; 1000]);
    assert!(said.contains("within a frame"), "{said}");
    let said = told(&["decode", "-", "-"], b"short");
    assert!(said.contains("too few for a safetensors file"), "{said}");
}

/// As in `vvae decode film.safetensors - | head -c 100`.
#[test]
fn a_reader_that_leaves_ends_it_quietly() {
    let folder = Folder::new("pipes-left");
    let clip = folder.file("clip.y4m", &y4m(64, 64, 40));
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = vvae(&["roundtrip", text(&clip), "-", "-f", "rgb"]).stdout(writer).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*said), (Some(141), ""));
}
