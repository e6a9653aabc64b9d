//! XXH64, a checksum that is the same on every machine and in every version. Detects damage, not tampering.

use xxhash_rust::xxh64::Xxh64;

/// The checksum of bytes added in pieces. The division into pieces makes no difference.
#[derive(Clone, Default)]
pub struct Checksum(Xxh64);

impl Checksum {
    pub fn of(bytes: &[u8]) -> u64 {
        xxhash_rust::xxh64::xxh64(bytes, 0)
    }

    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of everything added so far.
    pub fn value(&self) -> u64 {
        self.0.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_texts_have_their_published_checksums() {
        let text = b"Nobody inspects the spammish repetition";
        let mut sum = Checksum::default();
        text.chunks(7).for_each(|part| sum.add(part));
        assert_eq!([Checksum::of(b""), Checksum::of(text)], [0xef46_db37_51d8_e999, 0xfbce_a83c_8a37_8bf1]);
        assert_eq!(sum.value(), Checksum::of(text));
    }
}
