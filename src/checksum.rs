//! XXH64, a checksum that is the same on every machine and in every version. Detects damage, not tampering.

const PRIMES: [u64; 5] =
    [0x9e37_79b1_85eb_ca87, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x85eb_ca77_c2b2_ae63, 0x27d4_eb2f_1656_67c5];
const STRIPE: usize = 32;

/// The checksum of bytes added in pieces. The division into pieces makes no difference.
#[derive(Debug, Clone)]
pub struct Checksum {
    lanes: [u64; 4],
    total: u64,
    /// The start of the next stripe: `held` bytes.
    rest: [u8; STRIPE],
    held: usize,
}

impl Default for Checksum {
    fn default() -> Checksum {
        let lanes = [PRIMES[0].wrapping_add(PRIMES[1]), PRIMES[1], 0, PRIMES[0].wrapping_neg()];
        Checksum { lanes, total: 0, rest: [0; STRIPE], held: 0 }
    }
}

fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(PRIMES[1])).rotate_left(31).wrapping_mul(PRIMES[0])
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

impl Checksum {
    pub fn of(bytes: &[u8]) -> u64 {
        let mut sum = Checksum::default();
        sum.add(bytes);
        sum.value()
    }

    pub fn add(&mut self, mut bytes: &[u8]) {
        self.total = self.total.wrapping_add(bytes.len() as u64);
        if self.held > 0 {
            let count = bytes.len().min(STRIPE - self.held);
            self.rest[self.held..self.held + count].copy_from_slice(&bytes[..count]);
            (self.held, bytes) = (self.held + count, &bytes[count..]);
            if self.held < STRIPE {
                return;
            }
            let stripe = self.rest;
            self.stripe(&stripe);
        }
        let (stripes, rest) = bytes.as_chunks::<STRIPE>();
        stripes.iter().for_each(|stripe| self.stripe(stripe));
        self.rest[..rest.len()].copy_from_slice(rest);
        self.held = rest.len();
    }

    fn stripe(&mut self, stripe: &[u8; STRIPE]) {
        for (lane, bytes) in self.lanes.iter_mut().zip(stripe.chunks_exact(8)) {
            *lane = round(*lane, word(bytes));
        }
    }

    /// The checksum of everything added so far.
    pub fn value(&self) -> u64 {
        let [a, b, c, d] = self.lanes;
        let mut sum = match self.total >= STRIPE as u64 {
            true => {
                let turns = [a.rotate_left(1), b.rotate_left(7), c.rotate_left(12), d.rotate_left(18)];
                let start = turns.into_iter().fold(0, u64::wrapping_add);
                let merge = |sum: u64, lane| (sum ^ round(0, lane)).wrapping_mul(PRIMES[0]).wrapping_add(PRIMES[3]);
                self.lanes.into_iter().fold(start, merge)
            }
            false => PRIMES[4],
        };
        sum = sum.wrapping_add(self.total);
        let mut rest = &self.rest[..self.held];
        while let Some((bytes, after)) = rest.split_at_checked(8) {
            sum = (sum ^ round(0, word(bytes))).rotate_left(27).wrapping_mul(PRIMES[0]).wrapping_add(PRIMES[3]);
            rest = after;
        }
        if let Some((bytes, after)) = rest.split_first_chunk::<4>() {
            let half = u64::from(u32::from_le_bytes(*bytes)).wrapping_mul(PRIMES[0]);
            sum = (sum ^ half).rotate_left(23).wrapping_mul(PRIMES[1]).wrapping_add(PRIMES[2]);
            rest = after;
        }
        for byte in rest {
            sum = (sum ^ u64::from(*byte).wrapping_mul(PRIMES[4])).rotate_left(11).wrapping_mul(PRIMES[0]);
        }
        sum = (sum ^ (sum >> 33)).wrapping_mul(PRIMES[1]);
        sum = (sum ^ (sum >> 29)).wrapping_mul(PRIMES[2]);
        sum ^ (sum >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_texts_have_their_published_checksums() {
        for (text, sum) in [
            ("", 0xef46_db37_51d8_e999),
            ("a", 0xd24e_c4f1_a98c_6e5b),
            ("abc", 0x44bc_2cf5_ad77_0999),
            ("Nobody inspects the spammish repetition", 0xfbce_a83c_8a37_8bf1),
        ] {
            assert_eq!(Checksum::of(text.as_bytes()), sum, "{text}");
        }
    }

    #[test]
    fn division_into_pieces_makes_no_difference() {
        let bytes: Vec<u8> = (0..500u32).map(|i| (i * i) as u8).collect();
        for piece in [1, 3, 31, 32, 33, 100] {
            let mut sum = Checksum::default();
            bytes.chunks(piece).for_each(|part| sum.add(part));
            assert_eq!(sum.value(), Checksum::of(&bytes), "{piece}");
        }
    }
}
