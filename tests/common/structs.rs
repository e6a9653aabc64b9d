//! Every struct of the ABI with its fields.

/// Calls a macro with the structs behind its other arguments. Its patterns have to name every field.
macro_rules! with_structs {
    ($layout:ident $($arguments:tt)*) => {
        $layout! { $($arguments)*
            vvae_tensor { data, device_type, device_id, ndim, dtype, shape, strides, byte_offset }
            vvae_create_info {
                struct_size, abi_version, weights, device, log, log_user, alloc, free, alloc_user, device_alloc,
                device_free, device_alloc_user, progress, progress_user,
            }
            vvae_run_info { struct_size, flags, cuda_stream, progress, progress_user, logvar }
            vvae_model_desc {
                struct_size, pixel_channels, latent_channels, spatial_scale, time_scale, decoded_channels, packing,
                packed_channels, latents_known, statistics_count, family, latent_format, latent_formats, latent_scale,
                latent_shift, latent_means, latent_deviations,
            }
            vvae_plan_info {
                struct_size, exact, device_bytes, host_bytes, weight_bytes, workspace_bytes, input_shape, output_shape,
                slice_frames, chunk_frames, chunk_count, tile_rows, tile_columns, tile_height, tile_width, tile_overlap,
                text_length, offloaded_frame_bytes, moved_bytes_per_frame, seconds, offloaded_weight_bytes,
            }
            vvae_run_report {
                struct_size, exact, node, seconds, estimated_seconds, device_bytes, host_bytes, slice_frames, tile_rows,
                tile_columns, text_length,
            }
            vvae_memory_info { struct_size, streams, now, peak, reserved, host }
            vvae_handle_device_info {
                struct_size, device_count, device_type, device_id, id, unused, now, peak, reserved, host, device_bytes,
                host_bytes, first_clip, first_frame, frames, seconds, measured_seconds,
            }
            vvae_device_desc {
                struct_size, device_type, device_id, id, name, memory_total, memory_free, uuid, compute_major, compute_minor,
            }
            vvae_node_desc { struct_size, reserved, id, label, help }
            vvae_port_desc { struct_size, direction, optional, dtype_count, dtypes, name, kind, help }
            vvae_param_desc {
                struct_size, kind, flags, choice_count, key, default_value, unit, help, min, max, step,
            }
        }
    };
}
pub(crate) use with_structs;
