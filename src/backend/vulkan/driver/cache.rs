//! Compiled kernels on disk, one file for each driver and card. A damaged file, or one of another driver, is as none.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ash::vk;

use super::device::Device;
use crate::checksum::Checksum;
use crate::file::{Replacement, open_regular};

/// Anything longer is no cache.
const MOST_BYTES: u64 = 256 << 20;
/// The file begins with this and the sum of what follows.
const MAGIC: [u8; 8] = *b"vvae-pc1";

/// Kernels that are compiled already. Nothing depends on the file: without one, they are compiled again.
pub struct PipelineCache {
    device: Arc<Device>,
    handle: vk::PipelineCache,
    path: Option<PathBuf>,
}

impl PipelineCache {
    pub fn open(device: &Arc<Device>) -> PipelineCache {
        let path = folder().map(|folder| folder.join(file_name(&device.physical.cache_key)));
        let found = path.as_deref().and_then(read).unwrap_or_default();
        let create = |data: &[u8]| {
            let info = vk::PipelineCacheCreateInfo::default().initial_data(data);
            // SAFETY: the structure lives during the call. The driver checks whether the data is its own.
            unsafe { device.raw.create_pipeline_cache(&info, None) }
        };
        let handle = create(&found).or_else(|_| create(&[])).unwrap_or_default();
        PipelineCache { device: Arc::clone(device), handle, path }
    }

    /// Null if the driver has none.
    pub fn handle(&self) -> vk::PipelineCache {
        self.handle
    }

    /// Writes everything to the file. Where that fails, the next process compiles again.
    pub fn store(&self) {
        let Some(path) = self.path.as_deref().filter(|_| self.handle != vk::PipelineCache::null()) else { return };
        // SAFETY: the cache is of this device.
        if let Ok(data) = unsafe { self.device.raw.get_pipeline_cache_data(self.handle) } {
            let _ = write(path, &data);
        }
    }
}

impl Drop for PipelineCache {
    fn drop(&mut self) {
        // SAFETY: no pipeline is being made.
        unsafe { self.device.raw.destroy_pipeline_cache(self.handle, None) };
    }
}

/// The user's folder for caches; `None` if the environment does not say.
fn folder() -> Option<PathBuf> {
    // A relative path would make a folder wherever the program runs.
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let usual = || Some(set("HOME")?.join(".cache"));
    let caches = if cfg!(windows) { set("LOCALAPPDATA") } else { set("XDG_CACHE_HOME").or_else(usual) };
    Some(caches?.join("video-vae"))
}

fn file_name(key: &[u8]) -> String {
    format!("vulkan-{:016x}.bin", Checksum::of(key))
}

/// `None` if there is no file, or one that is not complete.
fn read(path: &Path) -> Option<Vec<u8>> {
    let (mut bytes, file) = (Vec::new(), open_regular(path).ok()?.0?);
    file.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    let (head, data) = bytes.split_at_checked(16)?;
    (head[..8] == MAGIC && head[8..] == Checksum::of(data).to_le_bytes()).then(|| data.to_vec())
}

fn write(path: &Path, data: &[u8]) -> crate::error::Result<()> {
    let fail = |why| crate::file::cannot_write("the cache of kernels", path, &why);
    path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(fail)?;
    let mut file = Replacement::new("the cache of kernels", path)?;
    let head = [MAGIC, Checksum::of(data).to_le_bytes()].concat();
    file.write_all(&head).and_then(|()| file.write_all(data)).map_err(fail)?;
    file.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_files_are_as_none() {
        let folder = std::env::temp_dir().join(format!("vvae-pipeline-cache-{}", std::process::id()));
        let path = folder.join("a").join(file_name(b"driver"));
        assert_eq!(read(&path), None);
        write(&path, b"pipelines").unwrap();
        assert_eq!(read(&path).as_deref(), Some(&b"pipelines"[..]));
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            std::fs::write(&path, &damaged).unwrap();
            assert_eq!(read(&path), None, "byte {at}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(read(&path), None, "{at} bytes");
        }
        // What is there is replaced, and other drivers have other files.
        write(&path, b"others").unwrap();
        assert_eq!(read(&path).as_deref(), Some(&b"others"[..]));
        assert_ne!(file_name(b"driver"), file_name(b"another"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
