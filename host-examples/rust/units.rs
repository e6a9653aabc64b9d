//! Numbers as people read and write them.

use crate::Result;

/// "1.5 GiB"
pub fn bytes(count: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} bytes") } else { format!("{value:.2} {}", units[unit]) }
}

/// "4.2 s", "12 min" or "3.5 h"
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 100.0 * 60.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// "1 frame" or "2 frames".
pub fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The most memory this process has had, where the system tells.
pub fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// "250,648,227"
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// No clip has more. Sums and products of such numbers have room.
pub const MOST_FRAMES: u64 = 1 << 32;
/// No picture is wider or higher.
pub const MOST_PIXELS: u64 = 1 << 17;

/// Sizes such as 121x1080x1920 or 640x480, each at least 1: height and width, or both in the other order, after frames.
pub fn sizes<const N: usize>(text: &str, example: &str) -> Result<[u64; N]> {
    let parsed: Option<Vec<u64>> = text.split('x').map(|part| part.parse().ok().filter(|n| *n > 0)).collect();
    let sizes: [u64; N] = parsed
        .and_then(|parts| parts.try_into().ok())
        .ok_or_else(|| format!("\"{text}\" is no size of {N} numbers; write it like {example}"))?;
    let (frames, sides) = sizes.split_at(N.saturating_sub(2));
    if frames.iter().any(|frames| *frames > MOST_FRAMES) || sides.iter().any(|side| *side > MOST_PIXELS) {
        return Err(format!("\"{text}\" is more than {MOST_FRAMES} frames, or {MOST_PIXELS} pixels a side; give less"));
    }
    Ok(sizes)
}

/// Frames per second, as a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub frames: u64,
    pub seconds: u64,
}

impl Rate {
    /// What a clip gets that says nothing about its rate.
    pub const DEFAULT: Rate = Rate { frames: 24, seconds: 1 };

    /// "24", "23.976" or "24000/1001".
    pub fn parse(text: &str) -> Result<Rate> {
        let whole = |frames: f64| Rate { frames: frames.round() as u64, seconds: 1 };
        let rate = match text.split_once(['/', ':']) {
            Some((frames, seconds)) => {
                frames.parse().ok().zip(seconds.parse().ok()).map(|(frames, seconds)| Rate { frames, seconds })
            }
            None => text.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate < 1e6).map(|rate| {
                // 23.98, 29.97 and 59.94 are roundings of 24, 30 and 60 times 1000/1001.
                let ntsc = Rate { frames: (rate * 1.001).round() as u64 * 1000, seconds: 1001 };
                let exact = (rate - rate.round()).abs() < 1e-9;
                let near = (ntsc.per_second() - rate).abs() < 0.006;
                match (exact, near) {
                    (true, _) => whole(rate),
                    (false, true) => ntsc,
                    (false, false) => Rate { frames: (rate * 1000.0).round() as u64, seconds: 1000 },
                }
            }),
        };
        // Programs keep such numbers in 31 bits.
        let counts = |n: u64| (1..1 << 31).contains(&n);
        rate.filter(|rate| counts(rate.frames) && counts(rate.seconds))
            .ok_or_else(|| format!("\"{text}\" is no frame rate; write it like 24, 29.97 or 24000/1001"))
    }

    /// Seconds as frames: of a time base the ticks a second.
    pub fn inverse(self) -> Rate {
        Rate { frames: self.seconds, seconds: self.frames }
    }

    pub fn per_second(self) -> f64 {
        self.frames as f64 / self.seconds as f64
    }
}

impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}/{}", self.frames, self.seconds)
    }
}

/// A number of bytes with or without a unit, in capitals or not; `None` for anything else, such as "auto".
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let scale = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        _ => return None,
    };
    Some((text[..digits].parse::<f64>().ok()? * scale) as u64).filter(|bytes| *bytes > 0)
}
