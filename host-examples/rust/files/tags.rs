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
}

impl Tags {
    /// Names in the metadata of a latent file, and the fields.
    pub fn fields(&mut self) -> [(&'static str, &mut String); 5] {
        [
            ("color_range", &mut self.range),
            ("color_space", &mut self.space),
            ("color_transfer", &mut self.transfer),
            ("color_primaries", &mut self.primaries),
            ("chroma", &mut self.chroma),
        ]
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
