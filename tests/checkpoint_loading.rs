//! A damaged checkpoint gives an error that names the fault, or a handle that works.

mod common;

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use common::safetensors::{Folder, Tensors, to_bytes};
use common::weights::{Sizes, random_weights};
use common::{Buffer, Random, Vae, create_info, golden};
use video_vae::capi::*;

fn tiny() -> (Tensors, u64) {
    let config = Sizes { channels: vec![2, 2, 4, 4], layers: 1, groups: 2, latent: 2, temporal_levels: 2 };
    (random_weights(&config.model(), 4), 2)
}

#[test]
fn errors_name_file_tensor_and_expectation() {
    let (tensors, groups) = tiny();
    let folder = Folder::new("errors");
    let open = |change: &dyn Fn(&mut Tensors)| {
        let mut changed = tensors.clone();
        change(&mut changed);
        Vae::open(&folder.file("file.safetensors", &to_bytes(&changed, groups))).map(|_| ())
    };
    assert_eq!(open(&|_| {}), Ok(()));
    let name = "decoder.up_blocks.1.resnets.0.conv1.weight";
    let failure = open(&|t| drop(t.remove(name))).unwrap_err();
    failure.says(VVAE_ERROR_CHECKPOINT, &["file.safetensors", name]);
    let failure = open(&|t| t.get_mut(name).unwrap().values[5] = f32::NAN).unwrap_err();
    failure.says(VVAE_ERROR_CHECKPOINT, &["file.safetensors", name]);
    let failure = open(&|t| t.get_mut(name).unwrap().shape.swap(1, 2)).unwrap_err();
    failure.says(VVAE_ERROR_CHECKPOINT, &["file.safetensors", name, "[4, 3, 4, 3, 3]", "[4, 4, 3, 3, 3]"]);
    let failure = open(&|t| drop(t.insert("extra".into(), t[name].clone()))).unwrap_err();
    failure.says(VVAE_ERROR_CHECKPOINT, &["file.safetensors", "extra"]);
    Vae::open(&folder.0.join("missing.safetensors"))
        .err()
        .unwrap()
        .says(VVAE_ERROR_CHECKPOINT, &["missing.safetensors"]);
    Vae::open(&folder.0).err().unwrap().says(VVAE_ERROR_CHECKPOINT, &[]);
}

#[test]
fn old_attention_names_give_the_same_video() {
    let (tensors, groups) = tiny();
    let folder = Folder::new("names");
    let old: Tensors = tensors
        .iter()
        .map(|(name, tensor)| {
            let mut tensor = tensor.clone();
            let names = [("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")];
            let found = names.iter().find(|(new, _)| name.contains(&format!("attentions.0.{new}.")));
            let name = found.map_or(name.clone(), |(new, old)| name.replace(new, old));
            if found.is_some() && tensor.shape.len() == 2 {
                tensor.shape.extend([1, 1]);
            }
            (name, tensor)
        })
        .collect();
    let latent = {
        let mut random = Random(1);
        let mut latent = Buffer::new(VVAE_DTYPE_F32, [1, 2, 2, 2, 2]);
        latent.f32_mut().iter_mut().for_each(|v| *v = random.below(100) as f32 / 50.0 - 1.0);
        latent
    };
    let videos = [("new", &tensors), ("old", &old)].map(|(name, tensors)| {
        let vae = Vae::open(&folder.file(name, &to_bytes(tensors, groups))).unwrap();
        let mut video = Buffer::new(VVAE_DTYPE_F32, [1, 3, 5, 16, 16]);
        vae.decode(&latent, &mut video).unwrap();
        video.bytes().to_vec()
    });
    assert!(old.keys().any(|name| name.contains("proj_attn")));
    assert!(videos[0] == videos[1]);
}

#[test]
fn files_cut_short_by_another_process_are_an_error() {
    let folder = Folder::new("cut");
    let whole = std::fs::read(golden("medium.safetensors")).unwrap();
    let path = folder.0.join("file.safetensors");
    for round in 0..40 {
        std::fs::write(&path, &whole).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        // First between opening and loading, for certain; then at any time.
        let (opened, on_open) = std::sync::mpsc::channel::<()>();
        let cut = std::thread::spawn(move || {
            match round {
                0 => drop(on_open.recv()),
                _ => std::thread::sleep(std::time::Duration::from_millis(2 * round)),
            }
            file.set_len(4096).unwrap();
        });
        let mut cut = Some(cut);
        let video = Vae::open(&path).and_then(|vae| {
            if round == 0 {
                drop(opened);
                cut.take().unwrap().join().unwrap();
            }
            let input = Buffer::new(VVAE_DTYPE_F32, [1, 16, 1, 1, 1]);
            vae.decode(&input, &mut Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 8, 8]))
        });
        if let Some(cut) = cut {
            cut.join().unwrap();
        }
        assert!(round > 0 || video.is_err(), "it was cut before its weights were read");
        if let Err(failure) = video {
            failure.says(VVAE_ERROR_CHECKPOINT, &["file.safetensors"]);
        }
    }
}

#[test]
fn changed_files_are_detected_at_first_use() {
    let folder = Folder::new("changes");
    let (tensors, groups) = tiny();
    let path = folder.file("file.safetensors", &to_bytes(&tensors, groups));
    let vae = Vae::open(&path).unwrap();
    std::fs::copy(golden("small.safetensors"), &path).unwrap();
    let input = Buffer::new(VVAE_DTYPE_F32, [1, 2, 1, 2, 2]);
    let failure = vae.decode(&input, &mut Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16])).unwrap_err();
    failure.says(VVAE_ERROR_CHECKPOINT, &["file.safetensors", "changed"]);
}

/// Other systems do not tell when a file last changed.
#[cfg(unix)]
#[test]
fn weights_changed_in_place_are_detected_though_their_time_is_set_back() {
    use std::io::{Seek, SeekFrom, Write};
    let folder = Folder::new("time");
    let (tensors, groups) = tiny();
    let bytes = to_bytes(&tensors, groups);
    let path = folder.file("file.safetensors", &bytes);
    let vae = Vae::open(&path).unwrap();
    let mut file = std::fs::File::options().write(true).open(&path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    file.seek(SeekFrom::End(-4)).unwrap();
    file.write_all(&[bytes[bytes.len() - 4] ^ 1]).unwrap();
    file.set_modified(modified).unwrap();
    let input = Buffer::new(VVAE_DTYPE_F32, [1, 2, 1, 2, 2]);
    let failure = vae.decode(&input, &mut Buffer::new(VVAE_DTYPE_F32, [1, 3, 1, 16, 16])).unwrap_err();
    failure.says(VVAE_ERROR_CHECKPOINT, &["file.safetensors", "changed"]);
}

/// Counts its calls, and asks to stop from the first one on.
unsafe extern "C" fn stop_at_once(calls: *mut c_void, done: u64, total: u64, stage: *const c_char) -> i32 {
    // SAFETY: the test passes a counter that outlives the call, and the library a text.
    let (calls, stage) = unsafe { (&*calls.cast::<AtomicU32>(), CStr::from_ptr(stage)) };
    assert!(done > 0 && done <= total && stage == c"check", "{done} of {total}: {stage:?}");
    calls.fetch_add(1, SeqCst);
    1
}

#[test]
fn the_check_of_a_file_can_be_cancelled() {
    let folder = Folder::new("cancel");
    let (tensors, groups) = tiny();
    let path = CString::new(folder.file("file.safetensors", &to_bytes(&tensors, groups)).to_str().unwrap()).unwrap();
    let calls = AtomicU32::new(0);
    let user = std::ptr::from_ref(&calls).cast_mut().cast();
    let info = vvae_create_info { progress: Some(stop_at_once), progress_user: user, ..create_info(&path) };
    Vae::create(&info).map(|_| ()).unwrap_err().says(VVAE_ERROR_CANCELLED, &[]);
    assert_eq!(calls.load(SeqCst), 1);
    Vae::create(&create_info(&path)).expect("nothing is left behind");
}
