using System.Collections.Generic;

namespace VideoVae
{
    /// <summary>What a job takes, known before it runs.</summary>
    public sealed unsafe class VaePlan
    {
        internal VaePlan(Native.vvae_plan_info* info, string text)
        {
            Text = text;
            Exact = info->exact == 1;
            DeviceBytes = info->device_bytes;
            HostBytes = info->host_bytes;
            WeightBytes = info->weight_bytes;
            WorkspaceBytes = info->workspace_bytes;
            Input = new Shape(info->input_shape);
            Output = new Shape(info->output_shape);
            SliceFrames = info->slice_frames;
            var chunks = new long[info->chunk_count];
            for (int i = 0; i < chunks.Length; i++) chunks[i] = info->chunk_frames[i];
            ChunkFrames = chunks;
            TileRows = info->tile_rows;
            TileColumns = info->tile_columns;
            TileHeight = info->tile_height;
            TileWidth = info->tile_width;
            TileOverlap = info->tile_overlap;
            OffloadedFrameBytes = info->offloaded_frame_bytes;
            MovedBytesPerFrame = info->moved_bytes_per_frame;
            Seconds = info->seconds;
            OffloadedWeightBytes = info->offloaded_weight_bytes;
        }

        /// <summary>The plan in words.</summary>
        public string Text { get; }
        /// <summary>The numbers of the authors' implementation; false: close but not the same, in tiles or with cache=u8.</summary>
        public bool Exact { get; }
        public ulong DeviceBytes { get; }
        public ulong HostBytes { get; }
        public ulong WeightBytes { get; }
        public ulong WorkspaceBytes { get; }
        public Shape Input { get; }
        public Shape Output { get; }
        public long SliceFrames { get; }
        public IReadOnlyList<long> ChunkFrames { get; }
        public long TileRows { get; }
        public long TileColumns { get; }
        public long TileHeight { get; }
        public long TileWidth { get; }
        public long TileOverlap { get; }
        /// <summary>The part of HostBytes for offloaded frames: causal caches and other activations.</summary>
        public ulong OffloadedFrameBytes { get; }
        /// <summary>The part of HostBytes for offloaded weights.</summary>
        public ulong OffloadedWeightBytes { get; }
        public ulong MovedBytesPerFrame { get; }
        /// <summary>About how long the job takes; 0 for a stream.</summary>
        public double Seconds { get; }

        public override string ToString()
        {
            return Text;
        }
    }
}
