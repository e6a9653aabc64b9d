//! How the samples of a video are meant: depth, chroma and colour, in ffmpeg's words.

/// What ffprobe says of a stream, and a written one should say again. Empty: it does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tags {
    /// "tv" or "pc".
    pub range: String,
    pub space: String,
    pub transfer: String,
    pub primaries: String,
    /// "420", "422" or "444", of a stream with luma and chroma.
    pub chroma: String,
    /// Width to height of a pixel, such as "16:11", if it is not square.
    pub aspect: String,
    /// Of HDR video, as `hdr` writes it.
    pub mastering: String,
    pub light: String,
}

impl Tags {
    /// Names in the metadata of a latent file, and the fields.
    pub fn fields(&mut self) -> [(&'static str, &mut String); 8] {
        [
            ("color_range", &mut self.range),
            ("color_space", &mut self.space),
            ("color_transfer", &mut self.transfer),
            ("color_primaries", &mut self.primaries),
            ("chroma", &mut self.chroma),
            ("sample_aspect_ratio", &mut self.aspect),
            ("mastering_display", &mut self.mastering),
            ("content_light", &mut self.light),
        ]
    }

    /// Width to height of a pixel that is not square.
    pub fn ratio(&self) -> Option<(u32, u32)> {
        let (width, height) = self.aspect.split_once(':')?;
        let ratio: (u32, u32) = (width.parse().ok()?, height.parse().ok()?);
        Some(ratio).filter(|(width, height)| width != height && *width > 0 && *height > 0)
    }

    /// Colours that those who see no tags take wrongly, in words.
    pub fn unusual(&self) -> Option<String> {
        const USUAL: [&str; 6] = ["", "bt709", "smpte170m", "bt470bg", "bt470m", "iec61966-2-1"];
        let unusual = |tag: &&str| !USUAL.contains(tag);
        let words: Vec<&str> = [self.primaries.as_str(), self.transfer.as_str()].into_iter().filter(unusual).collect();
        (!words.is_empty()).then(|| format!("colour tags ({})", words.join(", ")))
    }

    /// Whether its light goes beyond that of usual displays.
    pub fn is_hdr(&self) -> bool {
        matches!(self.transfer.as_str(), "smpte2084" | "arib-std-b67")
    }

    /// The matrix between RGB and luma, as the scale filter spells it, if the tags name one.
    pub fn matrix(&self) -> Option<&'static str> {
        match self.space.as_str() {
            "bt709" => Some("bt709"),
            "smpte170m" => Some("smpte170m"),
            "bt470bg" => Some("bt470"),
            "smpte240m" => Some("smpte240m"),
            "fcc" => Some("fcc"),
            "bt2020nc" | "bt2020c" => Some("bt2020"),
            _ => None,
        }
    }
}

/// Bits of a sample, by the name of a pixel format such as yuv420p10le, p010le, rgb48be or gray16le.
pub fn bits_of(pixel_format: &str) -> u32 {
    let name = pixel_format.trim_end_matches("le").trim_end_matches("be");
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    match name[name.len() - digits..].parse::<u32>() {
        _ if name.starts_with("nv") => 8,
        Ok(bits @ 9..=16) => bits,
        Ok(48 | 64) => 16,
        _ => 8,
    }
}

pub fn chroma_of(pixel_format: &str) -> String {
    let known = [("420", "420"), ("422", "422"), ("444", "444"), ("p010", "420"), ("p210", "422"), ("p410", "444")];
    let found = known.iter().find(|(part, _)| pixel_format.contains(part));
    found.map(|(_, chroma)| (*chroma).to_owned()).unwrap_or_default()
}

/// Whether pixels of this format may be transparent, such as yuva420p, rgba, argb, gbrap12le and ya8.
pub fn has_alpha(pixel_format: &str) -> bool {
    const BEGINNINGS: [&str; 8] = ["yuva", "rgba", "argb", "bgra", "abgr", "gbrap", "ya8", "ya16"];
    BEGINNINGS.iter().any(|beginning| pixel_format.starts_with(beginning))
}
