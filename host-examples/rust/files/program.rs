//! The programs ffmpeg and ffprobe: what they are called, and a process of theirs.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;

use crate::Result;

/// A child that is ended with us, and what it complained about.
pub struct Process {
    child: Child,
    complaints: Option<JoinHandle<String>>,
}

pub fn missing(path: &Path, program: &str, why: &std::io::Error) -> String {
    let name = path.display();
    format!(
        "{name} needs the program {program}, which cannot be started ({why}); install it (Debian and Ubuntu: apt \
         install ffmpeg, macOS: brew install ffmpeg, Windows: winget install ffmpeg), or use .y4m, .png or .raw"
    )
}

/// A name that no protocol or option is read into.
pub fn as_file(path: &Path) -> OsString {
    let mut name = OsString::from("file:");
    name.push(path);
    name
}

impl Process {
    pub fn start(path: &Path, command: &mut Command) -> Result<Process> {
        let mut child = command.stderr(Stdio::piped()).spawn().map_err(|why| missing(path, "ffmpeg", &why))?;
        let stderr = child.stderr.take();
        // A full pipe would stop the child, so somebody has to read it all the time.
        let complaints = stderr.map(|mut stderr| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let _ = stderr.read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        Ok(Process { child, complaints })
    }

    pub fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    pub fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Waits for it to end, and for it to have been content.
    pub fn end(&mut self, path: &Path) -> Result<()> {
        let status = self.child.wait().map_err(|why| format!("ffmpeg was lost: {why}"))?;
        let said = self.complaints.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        if status.success() {
            return Ok(());
        }
        let line = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no word why").trim().to_owned();
        Err(format!("ffmpeg failed on {}: {line}", path.display()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn ffmpeg() -> Command {
    let mut command = Command::new(std::env::var_os("FFMPEG").unwrap_or_else(|| "ffmpeg".into()));
    command.args(["-nostdin", "-hide_banner", "-v", "error"]);
    command
}

/// $FFPROBE, else beside $FFMPEG, else by its name.
pub fn ffprobe() -> Command {
    let beside = || {
        let ffmpeg = PathBuf::from(std::env::var_os("FFMPEG")?);
        let folder = ffmpeg.parent().filter(|folder| !folder.as_os_str().is_empty())?;
        Some(folder.join("ffprobe").into_os_string())
    };
    let mut command = Command::new(std::env::var_os("FFPROBE").or_else(beside).unwrap_or_else(|| "ffprobe".into()));
    command.args(["-hide_banner", "-v", "error"]).stdin(Stdio::null());
    command
}
