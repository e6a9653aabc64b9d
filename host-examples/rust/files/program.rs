//! The programs ffmpeg and ffprobe: what they are called, and a process of theirs.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use crate::Result;

/// What a process complained about. The rest of what it says is left out.
const MOST_COMPLAINTS: usize = 32;

/// A child that is ended with us.
pub struct Process {
    child: Child,
    complaints: Arc<Mutex<Vec<String>>>,
    /// Ends with the child, and has its last line, whatever that is.
    listener: Option<JoinHandle<String>>,
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

/// What both tell, with the level of each line.
const LEVEL: &str = "level+warning";

/// "[h264 @ 0x5581] [error] no frame" becomes "h264: no frame". `None` unless it is about something that went wrong:
/// of mere warnings those that name what is corrupt.
pub fn complaint(line: &str) -> Option<String> {
    let (mut name, mut rest, mut levelled) = (String::new(), line.trim(), false);
    while let Some((inner, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        match inner.split_once(" @ ") {
            Some((of, _)) => name = format!("{of}: "),
            None if matches!(inner, "error" | "fatal" | "panic") => levelled = true,
            None if inner == "warning" && after.contains("orrupt") => levelled = true,
            None => return None,
        }
        rest = after;
    }
    // Lines without a level go on with the one before, or are of a library's own.
    levelled.then(|| format!("{name}{rest}"))
}

impl Process {
    /// Starts ffmpeg for a file.
    pub fn start(path: &Path, command: &mut Command) -> Result<Process> {
        Process::start_named(path, command, "ffmpeg")
    }

    /// Starts ffprobe with some words about a file. Its answer is for the caller to read.
    pub fn ask(path: &Path, words: &[&str]) -> Result<Process> {
        let mut command = ffprobe();
        command.args(["-hide_banner", "-v", LEVEL]).args(words).arg(as_file(path));
        Process::start_named(path, command.stdin(Stdio::null()).stdout(Stdio::piped()), "ffprobe")
    }

    fn start_named(path: &Path, command: &mut Command, program: &str) -> Result<Process> {
        let mut child = command.stderr(Stdio::piped()).spawn().map_err(|why| missing(path, program, &why))?;
        let complaints = Arc::new(Mutex::new(Vec::new()));
        // A full pipe would stop the child, so somebody has to read it all the time.
        let listener = child.stderr.take().map(|stderr| {
            let heard = Arc::clone(&complaints);
            std::thread::spawn(move || {
                let mut last = String::new();
                for line in BufReader::new(stderr).split(b'\n').map_while(std::io::Result::ok) {
                    let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
                    let room = MOST_COMPLAINTS - heard.len().min(MOST_COMPLAINTS);
                    last = String::from_utf8_lossy(&line).trim().to_owned();
                    heard.extend(complaint(&last).into_iter().take(room));
                }
                last
            })
        });
        Ok(Process { child, complaints, listener })
    }

    /// One whose complaints somebody else reads.
    pub fn unheard(child: Child) -> Process {
        Process { child, complaints: Arc::default(), listener: None }
    }

    pub fn stderr(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    pub fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    pub fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// What it has complained about so far.
    pub fn complaints(&self) -> Vec<String> {
        self.complaints.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for it to end. Whether it did not fail, and what it complained about: something, if it did.
    pub fn outcome(&mut self) -> Result<(bool, Vec<String>)> {
        let status = self.child.wait().map_err(|why| format!("ffmpeg was lost: {why}"))?;
        if let Some(signal) = ended_by(status) {
            return Err(format!("ffmpeg was ended by signal {signal}; run it again"));
        }
        let last = self.listener.take().and_then(|listener| listener.join().ok()).unwrap_or_default();
        let mut complaints = self.complaints();
        if !status.success() && complaints.is_empty() {
            complaints.push(if last.is_empty() { "it does not say why".into() } else { last });
        }
        Ok((status.success(), complaints))
    }

    /// Waits for it to end. What it complained about although it did not fail.
    pub fn end(&mut self, path: &Path) -> Result<Vec<String>> {
        let (done, complaints) = self.outcome()?;
        if done {
            return Ok(complaints);
        }
        Err(failed(path, complaints.last().map_or("", String::as_str)))
    }
}

/// The signal that ended a process, where systems have such.
#[cfg(unix)]
fn ended_by(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

#[cfg(not(unix))]
fn ended_by(_: ExitStatus) -> Option<i32> {
    None
}

/// A full disk is the one failure whose remedy is known.
pub fn failed(path: &Path, line: &str) -> String {
    let full = ["No space left", "File too large", "Disk quota"].iter().any(|known| line.contains(known));
    format!("ffmpeg failed on {}: {line}{}", path.display(), if full { "; make room" } else { "" })
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// $FFMPEG, else by its name.
pub fn ffmpeg() -> Command {
    talkative(LEVEL)
}

/// One that tells what this level has.
pub fn talkative(level: &str) -> Command {
    let mut command = Command::new(std::env::var_os("FFMPEG").unwrap_or_else(|| "ffmpeg".into()));
    command.args(["-nostdin", "-hide_banner", "-v", level]);
    command
}

/// Frames keep their times, and none is dropped or repeated. The option has another name before version 5.1, and the
/// old name is gone from the newest.
pub fn as_they_are() -> [&'static str; 2] {
    static MODE: OnceLock<&str> = OnceLock::new();
    let ask = || {
        let help = ffmpeg().args(["-h", "long"]).stdin(Stdio::null()).output();
        let known = help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("-fps_mode"));
        if known { "-fps_mode" } else { "-vsync" }
    };
    [MODE.get_or_init(ask), "passthrough"]
}

/// $FFPROBE, else beside $FFMPEG, else by its name.
fn ffprobe() -> Command {
    let beside = || {
        let ffmpeg = PathBuf::from(std::env::var_os("FFMPEG")?);
        let folder = ffmpeg.parent().filter(|folder| !folder.as_os_str().is_empty())?;
        Some(folder.join("ffprobe").into_os_string())
    };
    Command::new(std::env::var_os("FFPROBE").or_else(beside).unwrap_or_else(|| "ffprobe".into()))
}

/// What ffprobe answers about a file.
pub fn ask(path: &Path, words: &[&str]) -> Result<Output> {
    let mut command = ffprobe();
    command.args(["-hide_banner", "-v", LEVEL]).args(words).arg(as_file(path));
    command.stdin(Stdio::null()).output().map_err(|why| missing(path, "ffprobe", &why))
}

/// The lines that it complained with.
pub fn complaints(output: &Output) -> Vec<String> {
    let said = String::from_utf8_lossy(&output.stderr);
    said.lines().filter_map(complaint).take(MOST_COMPLAINTS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_told_from_the_rest() {
        for (line, expected) in [
            ("[h264 @ 0x55] [error] no frame!", Some("h264: no frame!")),
            ("[vist#0:0/h264 @ 0x55] [dec:h264 @ 0x56] [error] Decode error", Some("dec:h264: Decode error")),
            ("[error] Error closing file", Some("Error closing file")),
            ("[mpegts @ 0x55] [warning] Packet corrupt (stream = 0)", Some("mpegts: Packet corrupt (stream = 0)")),
            ("[swscaler @ 0x55] [warning] deprecated pixel format used", None),
            ("[info] frame=    1", None),
            ("Consider increasing the value for analyzeduration", None),
            ("", None),
        ] {
            assert_eq!(complaint(line).as_deref(), expected, "{line}");
        }
    }
}
