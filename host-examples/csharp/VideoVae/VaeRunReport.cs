namespace VideoVae
{
    /// <summary>A run that has finished: an encode, a decode, or a pull that wrote frames.</summary>
    public sealed unsafe class VaeRunReport
    {
        internal VaeRunReport(Native.vvae_run_report* info, string text)
        {
            Text = text;
            Node = Utf8.Text(info->node);
            Exact = info->exact == 1;
            Seconds = info->seconds;
            EstimatedSeconds = info->estimated_seconds;
            DeviceBytes = info->device_bytes;
            HostBytes = info->host_bytes;
            SliceFrames = info->slice_frames;
            TileRows = info->tile_rows;
            TileColumns = info->tile_columns;
        }

        /// <summary>The plan that it ran by, in words.</summary>
        public string Text { get; }
        /// <summary>"encode" or "decode".</summary>
        public string Node { get; }
        /// <summary>The numbers of the authors' implementation; false: close but not the same, in tiles or with cache=u8.</summary>
        public bool Exact { get; }
        /// <summary>From call to return.</summary>
        public double Seconds { get; }
        /// <summary>What the plan said; 0 for a stream.</summary>
        public double EstimatedSeconds { get; }
        public ulong DeviceBytes { get; }
        public ulong HostBytes { get; }
        public long SliceFrames { get; }
        public long TileRows { get; }
        public long TileColumns { get; }

        public override string ToString()
        {
            return Text;
        }
    }
}
