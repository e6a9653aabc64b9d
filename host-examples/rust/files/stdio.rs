//! Standard input and output under the name `-`, and files, behind one face.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write, stdin, stdout};
use std::path::Path;

use crate::Result;
use crate::draft::{self, Draft};

/// Whether a path stands for standard input or output.
pub fn is_stdio(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Whether standard input begins so. Nothing is taken from it.
pub fn begins_with(magic: &[u8]) -> bool {
    stdin().lock().fill_buf().is_ok_and(|bytes| bytes.is_empty() || bytes.starts_with(magic))
}

/// A buffered input, and its length where it has one.
pub struct Input {
    pub from: BufReader<Box<dyn Read + Send>>,
    pub length: Option<u64>,
}

pub fn open(path: &Path) -> Result<Input> {
    const BUFFER: usize = 1 << 20;
    if is_stdio(path) {
        // Where systems have it, it stands for the file that standard input comes from.
        draft::protect(Path::new("/dev/stdin"));
        return Ok(Input { from: BufReader::with_capacity(BUFFER, Box::new(stdin())), length: None });
    }
    let name = path.display();
    let file = File::open(path).map_err(|why| format!("{name} cannot be opened: {why}"))?;
    let found = file.metadata().map_err(|why| format!("{name} cannot be read: {why}"))?;
    let length = found.is_file().then_some(found.len());
    Ok(Input { from: BufReader::with_capacity(BUFFER, Box::new(file)), length })
}

/// A buffered output. A file gets its name when it is finished.
pub struct Output {
    to: BufWriter<Box<dyn Write + Send>>,
    draft: Option<Draft>,
}

impl Output {
    pub fn create(path: &Path) -> Result<Output> {
        let draft = if is_stdio(path) { None } else { Some(Draft::new(path)?) };
        let to: Box<dyn Write + Send> = match &draft {
            Some(draft) => Box::new(draft.create()?),
            None => Box::new(stdout()),
        };
        Ok(Output { to: BufWriter::with_capacity(1 << 20, to), draft })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.to.write_all(bytes).map_err(failed)
    }

    pub fn finish(mut self) -> Result<()> {
        self.to.flush().map_err(failed)?;
        self.draft.map_or(Ok(()), Draft::finish)
    }
}

fn failed(why: std::io::Error) -> String {
    crate::say::reader_left(&why);
    format!("the output cannot be written: {why}; make room")
}

/// Standard input as a file, for formats that are not read from front to back. It is gone when dropped.
pub fn spooled() -> Result<Draft> {
    draft::protect(Path::new("/dev/stdin"));
    let draft = Draft::temporary("vvae-input")?;
    std::io::copy(&mut stdin().lock(), &mut draft.create()?)
        .map_err(|why| format!("standard input cannot be kept in {}: {why}", draft.path.display()))?;
    Ok(draft)
}

/// Copies a file to standard output.
pub fn pour(path: &Path) -> Result<()> {
    let mut file = File::open(path).map_err(|why| format!("{} cannot be opened: {why}", path.display()))?;
    let mut out = stdout().lock();
    std::io::copy(&mut file, &mut out).and_then(|_| out.flush()).map_err(failed)
}
