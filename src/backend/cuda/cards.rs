//! Cards that need not be here: what their makers publish of them, and what planning asks of a device.

use super::driver::KernelArch;
use super::launch::{CudaSizes, tiling};
use super::profile::{COPIES_REACHED, COPY_CONTENTION, MEMORY_REACHED, device_profile, products_reached};
use crate::backend::{AbsentDevice, Precision};
use crate::ir::Rates;

/// Published facts about a card.
struct Card {
    /// As the parameter `device_like` has it.
    key: &'static str,
    name: &'static str,
    capability: KernelArch,
    multiprocessors: u32,
    /// With boost.
    clock_hz: f64,
    memory_bytes: u64,
    /// Bytes a second of its memory.
    memory_rate: f64,
    /// Bytes a second over the bus, one way.
    bus_rate: f64,
}

const GIB: u64 = 1 << 30;
/// 16 lanes of PCIe 4.0 and 5.0: 16 and 32 GT/s in blocks of 130 bits for 128.
const PCIE_4: f64 = 31.5e9;
const PCIE_5: f64 = 63.0e9;
/// The part of the bus's rate that copies reach while as many go the other way: 48 to 50 GB/s on an H200.
const BUS_REACHED: f64 = 0.78;

/// As NVIDIA publishes them, of cards by its own design.
const CARDS: [Card; 6] = [
    Card {
        key: "rtx3060",
        name: "GeForce RTX 3060 (12 GB)",
        capability: KernelArch::new(8, 6),
        multiprocessors: 28,
        clock_hz: 1.777e9,
        memory_bytes: 12 * GIB,
        memory_rate: 360e9,
        bus_rate: PCIE_4,
    },
    Card {
        key: "rtx4070",
        name: "GeForce RTX 4070",
        capability: KernelArch::new(8, 9),
        multiprocessors: 46,
        clock_hz: 2.475e9,
        memory_bytes: 12 * GIB,
        memory_rate: 504e9,
        bus_rate: PCIE_4,
    },
    Card {
        key: "rtx4090",
        name: "GeForce RTX 4090",
        capability: KernelArch::new(8, 9),
        multiprocessors: 128,
        clock_hz: 2.52e9,
        memory_bytes: 24 * GIB,
        memory_rate: 1008e9,
        bus_rate: PCIE_4,
    },
    Card {
        key: "rtx5090",
        name: "GeForce RTX 5090",
        capability: KernelArch::new(12, 0),
        multiprocessors: 170,
        clock_hz: 2.407e9,
        memory_bytes: 32 * GIB,
        memory_rate: 1792e9,
        bus_rate: PCIE_5,
    },
    Card {
        key: "a100",
        name: "A100 SXM (80 GB)",
        capability: KernelArch::new(8, 0),
        multiprocessors: 108,
        clock_hz: 1.41e9,
        memory_bytes: 80 * GIB,
        memory_rate: 2039e9,
        bus_rate: PCIE_4,
    },
    Card {
        key: "h200",
        name: "H200 SXM",
        capability: KernelArch::HOPPER,
        multiprocessors: 132,
        clock_hz: 1.98e9,
        memory_bytes: 141_000_000_000,
        memory_rate: 4800e9,
        bus_rate: PCIE_5,
    },
];

impl Card {
    fn rates(&self, precision: Precision) -> Rates {
        Rates {
            products: products_reached(self.capability, self.multiprocessors, self.clock_hz, precision),
            memory: self.memory_rate * MEMORY_REACHED,
            copies: self.bus_rate * BUS_REACHED * COPIES_REACHED,
            copy_contention: COPY_CONTENTION,
        }
    }
}

/// A card of [`AbsentDevice::KEYS`], computing in this precision.
pub fn card(key: &str, precision: Precision) -> Option<AbsentDevice> {
    let card = CARDS.iter().find(|card| card.key == key)?;
    Some(AbsentDevice {
        key: card.key,
        name: card.name,
        precision,
        arithmetic: format!("compute capability {0} with kernels of {0}", card.capability),
        profile: device_profile(card.rates(precision), precision, card.capability),
        sizes: Box::new(CudaSizes::new(precision, card.capability)),
        memory_bytes: card.memory_bytes,
        check_layers: tiling::check_layers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_a_card() {
        assert_eq!(CARDS.each_ref().map(|card| card.key), AbsentDevice::KEYS);
    }

    /// Tensor products of 16-bit floats with f32 sums, without sparsity, as published, in TFLOP/s.
    #[test]
    fn products_of_a_cycle_give_the_published_rates() {
        let published = [25.5, 58.3, 165.2, 209.5, 312.0];
        for (card, published) in CARDS.iter().zip(published) {
            let reached = 2.0 * card.rates(Precision::Fp16).products / 1e12;
            assert!((reached / published / 0.6 - 1.0).abs() < 0.01, "{}: {reached} of {published}", card.key);
        }
    }
}
