//! What a hostile folder, a signal, a fork, a callback or a strange caller does to the library: an error or a right
//! result, never a hang, a foreign file overwritten or other bits.

#![cfg(unix)]

mod common;

use std::ffi::{CString, c_char, c_int};
use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use common::safetensors::Folder;
use common::{Stream, Vae, small};
use video_vae::capi::*;

unsafe extern "C" {
    fn mkfifo(path: *const c_char, mode: u32) -> c_int;
}

const LATENT: [i64; 5] = [1, 16, 1, 2, 2];

fn new_stream(vae: &Vae) -> Stream<'_> {
    vae.stream("decode", LATENT).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_planted_link_does_not_lead_a_saved_state_astray() {
    let (folder, vae) = (Folder::new("planted"), Vae::open(&small()).unwrap());
    let victim = folder.file("victim", b"precious");
    let path = folder.0.join("state");
    // The names that earlier versions used.
    for count in 0..64 {
        symlink(&victim, folder.0.join(format!("state.{}-{count}.partial", std::process::id()))).unwrap();
    }
    let stream = new_stream(&vae);
    stream.save_file(&path).unwrap();
    assert!(fs::read(&victim).unwrap() == b"precious");
    assert!(fs::symlink_metadata(&path).unwrap().is_file());
    assert!(fs::read(&path).unwrap() == stream.save().unwrap());
    assert_eq!(names(&folder.0).len(), 66, "no file is left behind");
}

#[test]
fn a_state_replaces_regular_files_only() {
    let (folder, vae) = (Folder::new("regular"), Vae::open(&small()).unwrap());
    let stream = new_stream(&vae);
    let state = stream.save().unwrap();
    let at = |name: &str| folder.0.join(name);
    let fifo = CString::new(at("fifo").to_str().unwrap()).unwrap();
    // SAFETY: a path.
    assert_eq!(unsafe { mkfifo(fifo.as_ptr(), 0o600) }, 0);
    let _socket = UnixListener::bind(at("socket")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    symlink("fifo", at("to-fifo")).unwrap();
    symlink("absent", at("to-nothing")).unwrap();
    let before = names(&folder.0);
    for name in ["fifo", "socket", "folder", "to-fifo"] {
        stream.save_file(&at(name)).unwrap_err().says(VVAE_ERROR_CHECKPOINT, &[name, "not a regular file"]);
    }
    stream.save_file(&at("to-nothing")).unwrap_err().says(VVAE_ERROR_CHECKPOINT, &["to-nothing", "written"]);
    stream.save_file(&at("..")).unwrap_err().says(VVAE_ERROR_CHECKPOINT, &["written"]);
    assert_eq!(names(&folder.0), before, "nothing was made or removed");
    assert!(fs::symlink_metadata(at("fifo")).unwrap().file_type().is_fifo());
    assert!(fs::symlink_metadata(at("socket")).unwrap().file_type().is_socket());

    fs::create_dir(at("elsewhere")).unwrap();
    let real = folder.file("elsewhere/real", b"old");
    symlink("elsewhere/real", at("to-file")).unwrap();
    stream.save_file(&at("to-file")).unwrap();
    assert!(fs::symlink_metadata(at("to-file")).unwrap().is_symlink(), "the link stays");
    assert!(fs::read(&real).unwrap() == state, "the file that it leads to is replaced");
    assert_eq!(names(&at("elsewhere")), ["real"]);
}
