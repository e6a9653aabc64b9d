//! SHA-256 (FIPS 180-4), to compare a checkpoint with its published sum.

use std::io::Read;

/// The first 32 bits of the fractional parts of the roots of the first primes: square roots for the start, cube roots
/// for the rounds.
fn constants() -> ([u32; 8], [u32; 64]) {
    let mut primes = (2u64..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    let primes: [u64; 64] = std::array::from_fn(|_| primes.next().expect("there are more primes"));
    // The largest r with r^power <= prime << (32 * power), by bisection; its low half is the fraction.
    let fraction = |prime: u64, power: u32| {
        let target = u128::from(prime) << (32 * power);
        let (mut low, mut high) = (0u128, 1u128 << 40);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if middle.pow(power) <= target { low = middle } else { high = middle }
        }
        low as u32
    };
    (std::array::from_fn(|i| fraction(primes[i], 2)), std::array::from_fn(|i| fraction(primes[i], 3)))
}

fn compress(state: &mut [u32; 8], rounds: &[u32; 64], block: &[u8]) {
    let mut words = [0u32; 64];
    for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
        *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    for i in 16..64 {
        let (a, b) = (words[i - 15], words[i - 2]);
        let a = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
        let b = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
        words[i] = words[i - 16].wrapping_add(a).wrapping_add(words[i - 7]).wrapping_add(b);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (round, word) in rounds.iter().zip(words) {
        let big = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let chosen = (e & f) ^ (!e & g);
        let first = h.wrapping_add(big).wrapping_add(chosen).wrapping_add(*round).wrapping_add(word);
        let big = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let second = big.wrapping_add((a & b) ^ (a & c) ^ (b & c));
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
    }
    for (sum, value) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *sum = sum.wrapping_add(value);
    }
}

/// The sum of everything that can be read, in hexadecimal.
pub fn sum(mut from: impl Read) -> std::io::Result<String> {
    let (mut state, rounds) = constants();
    let mut buffer = vec![0u8; 1 << 20];
    let mut length = 0u64;
    loop {
        let got = crate::files::read_up_to(&mut from, &mut buffer)?;
        length += got as u64;
        let whole = got / 64 * 64;
        for block in buffer[..whole].chunks_exact(64) {
            compress(&mut state, &rounds, block);
        }
        if got < buffer.len() {
            let mut tail = buffer[whole..got].to_vec();
            tail.push(0x80);
            tail.resize((tail.len() + 8).next_multiple_of(64) - 8, 0);
            tail.extend((length * 8).to_be_bytes());
            for block in tail.chunks_exact(64) {
                compress(&mut state, &rounds, block);
            }
            return Ok(state.iter().map(|word| format!("{word:08x}")).collect());
        }
    }
}
