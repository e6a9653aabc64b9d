//! UUIDs of devices.

/// A UUID as NVIDIA's tools print it.
pub fn dashed(uuid: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(uuid));
    [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]).join("-")
}

#[cfg(test)]
mod tests {
    #[test]
    fn dashed_writes_a_uuid_in_five_parts() {
        let bytes = std::array::from_fn(|i| 0xe0 + i as u8);
        assert_eq!(super::dashed(bytes), "e0e1e2e3-e4e5-e6e7-e8e9-eaebecedeeef");
    }
}
