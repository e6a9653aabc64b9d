/// Where a frame of activations lies between the layer that makes it and those that read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum At<D, H> {
    Device(D),
    /// In host memory, where layers that work in bands reach it. The statistics of its norm stay on the device.
    Host {
        frame: H,
        statistics: D,
    },
}

/// The frames of a convolution in bands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BandFrames {
    /// Past ones included. None where the input is no part of the band, as it needs no norm.
    pub inputs: u64,
    pub outputs: u64,
    /// Whether the shortcut's input comes from host memory, and whether the output goes there.
    pub shortcut_away: bool,
    pub out_away: bool,
}
