/// Pinned host memory of a job, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// To load frames through and to store them through: twice what one frame takes, so that one moves while the next is
    /// made.
    pub load: u64,
    pub store: u64,
    /// For frames that wait in host memory, most of them of the past.
    pub past: u64,
}

impl HostMemory {
    pub fn bytes(&self) -> u64 {
        self.load + self.store + self.past
    }
}
