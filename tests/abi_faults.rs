//! What a hostile folder, a signal, a fork, a callback or a strange caller does to the library: an error or a right
//! result, never a hang, a foreign file overwritten or other bits.

#![cfg(unix)]

mod common;

use std::ffi::{CString, c_char, c_int};
use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::ptr::null;

use common::safetensors::Folder;
use common::{Buffer, Stream, Vae, api, outcome, run_info, small};
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

/// A tensor inside the memory of a buffer.
fn within(buffer: &Buffer, byte_offset: u64, shape: &[i64; 5], strides: Option<&[i64; 5]>) -> vvae_tensor {
    let strides = strides.map_or(null(), |strides| strides.as_ptr());
    vvae_tensor { byte_offset, shape: shape.as_ptr(), strides, ..buffer.tensor() }
}

#[test]
fn an_output_needs_memory_of_its_own() {
    const VIDEO: [i64; 5] = [1, 3, 1, 16, 16];
    let vae = Vae::open(&small()).unwrap();
    let encode = |video: &vvae_tensor, latent: &vvae_tensor, logvar: *const vvae_tensor| {
        let run = vvae_run_info { logvar, ..run_info() };
        // SAFETY: the tensors describe memory of their buffers.
        outcome(vae.0, unsafe { (api().vvae_encode)(vae.0, video, latent, &run) })
    };
    let mut video = Buffer::new(VVAE_DTYPE_F32, VIDEO);
    video.f32_mut().iter_mut().enumerate().for_each(|(i, v)| *v = (i as f32 * 0.37).sin());
    let before = video.bytes().to_vec();
    let (mean, logvar) = (Buffer::new(VVAE_DTYPE_F32, LATENT), Buffer::new(VVAE_DTYPE_F32, LATENT));
    encode(&video.tensor(), &mean.tensor(), &logvar.tensor()).unwrap();

    let last = 3 * 16 * 16 * 4 - 4;
    for offset in [0, 256, last] {
        let inside = within(&video, offset, &LATENT, None);
        encode(&video.tensor(), &inside, null()).unwrap_err().says(VVAE_ERROR_TENSOR, &["latent and video"]);
        encode(&video.tensor(), &mean.tensor(), &inside)
            .unwrap_err()
            .says(VVAE_ERROR_TENSOR, &["logvar and video", "memory of its own"]);
    }
    assert!(video.bytes() == before, "nothing was written");
    encode(&video.tensor(), &mean.tensor(), &mean.tensor())
        .unwrap_err()
        .says(VVAE_ERROR_TENSOR, &["logvar and latent"]);
    // SAFETY: the tensors describe memory of their buffers.
    let decoded = unsafe { (api().vvae_decode)(vae.0, &within(&video, 64, &LATENT, None), &video.tensor(), null()) };
    outcome(vae.0, decoded).unwrap_err().says(VVAE_ERROR_TENSOR, &["video and latent"]);

    let stream = vae.stream("encode", VIDEO).unwrap();
    stream.push(Some(&video.tensor())).unwrap();
    let both = mean.tensor();
    let run = vvae_run_info { logvar: &both, ..run_info() };
    stream.pull(&both, Some(&run)).unwrap_err().says(VVAE_ERROR_TENSOR, &["logvar and out"]);

    // Halves of one buffer, as planes and with channels last.
    let planes = [128, 4, 4, 2, 1];
    let channels_last = [128, 1, 128, 64, 32];
    for (strides, second) in [(planes, 16 * 4 * 4), (channels_last, 16 * 4)] {
        let whole = Buffer::new(VVAE_DTYPE_F32, [1, 32, 1, 2, 2]);
        let halves = [0, second].map(|offset| within(&whole, offset, &LATENT, Some(&strides)));
        encode(&video.tensor(), &halves[0], &halves[1]).unwrap();
        for (half, expected) in [(0, &mean), (second, &logvar)] {
            for (n, expected) in expected.f32().iter().enumerate() {
                let (c, h, w) = (n / 4, n / 2 % 2, n % 2);
                let at = c as i64 * strides[1] + h as i64 * strides[3] + w as i64 * strides[4];
                assert_eq!(whole.f32()[half as usize / 4 + at as usize].to_bits(), expected.to_bits());
            }
        }
    }
}
