//! Compiles functions for wider vectors than every processor has.

/// Calls a function of these parameters by the same names, compiled for AVX2 where the processor has it. The function
/// must be inlined.
macro_rules! on_vectors {
    ($function:ident[$($generics:tt)*]($($name:ident: $type:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2")]
            fn avx2<$($generics)*>($($name: $type),*) {
                $function($($name),*);
            }
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has the instructions.
                return unsafe { avx2($($name),*) };
            }
        }
        $function($($name),*);
    }};
}
pub(super) use on_vectors;
