//! Choices from bytes. When none are left, every choice is the first one.

pub struct Bytes {
    data: Vec<u8>,
    at: usize,
}

impl Bytes {
    pub fn new(data: &[u8]) -> Bytes {
        Bytes { data: data.to_vec(), at: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.at >= self.data.len()
    }

    pub fn rest(&mut self) -> &[u8] {
        let from = self.at.min(self.data.len());
        self.at = self.data.len();
        &self.data[from..]
    }

    pub fn byte(&mut self) -> u8 {
        self.at += 1;
        self.data.get(self.at - 1).copied().unwrap_or(0)
    }

    pub fn next(&mut self) -> u64 {
        u64::from_le_bytes([(); 8].map(|()| self.byte()))
    }

    pub fn below(&mut self, n: u64) -> u64 {
        match n {
            0..=0x100 => u64::from(self.byte()) % n,
            0x101..=0x1_0000 => u64::from(u16::from_le_bytes([self.byte(), self.byte()])) % n,
            _ => self.next() % n,
        }
    }

    /// Never when no bytes are left, so that loops end.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == n - 1
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Any number; small ones, powers of two and their neighbours are frequent.
    pub fn number(&mut self) -> u64 {
        match self.below(8) {
            0..=2 => u64::from(self.byte()),
            3 => self.below(1 << 16),
            4 => 1 << self.below(64),
            5 => (1 << self.below(64)) - 1,
            6 => self.pick(&[u64::MAX, i64::MAX as u64, 1 << 32, u64::from(u32::MAX), 4096, 4097, 16384, 1 << 17]),
            _ => self.next(),
        }
    }

    /// As many bytes as the first one says, without NULs: a C string's.
    pub fn text(&mut self) -> Vec<u8> {
        let length = self.byte();
        (0..length).map_while(|_| (!self.is_empty()).then(|| self.byte())).filter(|byte| *byte != 0).collect()
    }
}
