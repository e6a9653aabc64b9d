/// How fast a device is, for estimates: good enough to choose between plans by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Multiplications a second.
    pub products: f64,
    /// Bytes a second of its own memory.
    pub memory: f64,
    /// Bytes a second from the host's memory while as many go to it.
    pub copies: f64,
    /// What copies cost the arithmetic beside them, as a part of the time that they take.
    pub beside: f64,
}
