//! A disk cache of the kernels' machine code, keyed by everything that the code depends on.

use super::nvrtc::{Nvrtc, Source};
use crate::error::DeviceError;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Bytes of SHA-256.
const DIGEST: usize = 32;

/// Compiles for one architecture, with a disk cache.
#[derive(Debug)]
pub struct Cubins {
    nvrtc: Nvrtc,
    arch: u32,
    /// The folder of `<digest of everything that was compiled>.cubin`; `None`: no disk cache.
    folder: Option<PathBuf>,
    n_compiled: AtomicUsize,
}

impl Cubins {
    /// Caches machine code in `folder`, if it is writable. Other processes may use the same folder.
    ///
    /// Errors: the compiler supports no architecture that a device of `capability` runs.
    pub fn new(nvrtc: Nvrtc, capability: u32, folder: Option<&Path>) -> Result<Self, DeviceError> {
        let Some(arch) = nvrtc.arch(capability) else {
            return Err(DeviceError::Cuda {
                op: format!("choose an architecture for compute capability {capability}"),
                status: "this NVRTC supports none: install a newer nvidia-cuda-nvrtc".to_owned(),
            });
        };
        let folder = folder.filter(|folder| fs::create_dir_all(folder).is_ok()).map(Path::to_owned);
        Ok(Self { nvrtc, arch, folder, n_compiled: AtomicUsize::new(0) })
    }

    /// Returns the number of sources that were compiled because the cache did not have them.
    pub fn n_compiled(&self) -> usize {
        self.n_compiled.load(Ordering::Relaxed)
    }

    /// Returns the machine code of each of `sources`, compiled on up to `n_threads` threads. Errors: the first in the
    /// order of the sources.
    pub fn get(&self, sources: &[Source], n_threads: usize) -> Result<Vec<Vec<u8>>, DeviceError> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(source) = sources.get(index) else { return done };
                done.push((index, self.one(source)));
            }
        };
        let mut all = thread::scope(|scope| {
            let threads: Vec<_> = (1..n_threads.min(sources.len())).map(|_| scope.spawn(work)).collect();
            let mut all = work();
            for thread in threads {
                all.extend(thread.join().expect("compilation returns errors and does not panic"));
            }
            all
        });
        all.sort_by_key(|&(index, _)| index);
        all.into_iter().map(|(_, cubin)| cubin).collect()
    }

    fn one(&self, source: &Source) -> Result<Vec<u8>, DeviceError> {
        let path = self.folder.as_ref().map(|folder| folder.join(format!("{}.cubin", self.key(source))));
        if let Some(cubin) = path.as_deref().and_then(read) {
            return Ok(cubin);
        }
        let cubin = self.nvrtc.compile(source, self.arch)?.cubin;
        self.n_compiled.fetch_add(1, Ordering::Relaxed);
        if let Some(path) = path {
            // If the write fails, the next start compiles again.
            let _ = write(&path, &cubin);
        }
        Ok(cubin)
    }

    /// Returns the digest, in hexadecimal, of everything that the machine code depends on.
    fn key(&self, source: &Source) -> String {
        let mut digest = Sha256::new();
        let machine = format!("NVRTC {} sm_{}", self.nvrtc.version(), self.arch);
        for part in [&machine, &source.text].into_iter().chain(&source.options) {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns the code that [`write`] wrote; `None` if the file does not exist or is damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let cubin = bytes.split_off(bytes.len().min(DIGEST));
    (bytes == Sha256::digest(&cubin)[..]).then_some(cubin)
}

/// Writes the digest and the code, under a temporary name until the file is complete.
fn write(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension(format!("{}-{:?}", std::process::id(), thread::current().id()));
    let written = fs::write(&temporary, [&Sha256::digest(cubin)[..], cubin].concat())
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}
