using System;
using System.Collections.Generic;
using System.Globalization;
using System.Runtime.InteropServices;
using System.Threading;

namespace VideoVae
{
    /// <summary>How a diffusion model reads raw latents z: (z - Shift) * Scale, or (z - mean) / deviation of each channel
    /// where Means are not empty.</summary>
    public sealed unsafe class VaeLatents
    {
        internal VaeLatents(Native.vvae_model_desc desc)
        {
            Format = Utf8.Text(desc.latent_format, 20);
            Packing = desc.packing;
            Channels = desc.packed_channels;
            Scale = desc.latent_scale;
            Shift = desc.latent_shift;
            Means = new ReadOnlySpan<double>(desc.latent_means, (int)desc.statistics_count).ToArray();
            Deviations = new ReadOnlySpan<double>(desc.latent_deviations, (int)desc.statistics_count).ToArray();
        }

        /// <summary>The published model; empty if a config.json beside the checkpoint has numbers of its own.</summary>
        public string Format { get; }
        /// <summary>Rows, and columns, that are one before that; their pixels are channels. 1: none are.</summary>
        public long Packing { get; }
        public long Channels { get; }
        public double Scale { get; }
        public double Shift { get; }
        public IReadOnlyList<double> Means { get; }
        public IReadOnlyList<double> Deviations { get; }
    }

    /// <summary>The sizes of a model, the shapes that follow from them, and what is known of its latents.</summary>
    public sealed unsafe class VaeModel
    {
        internal VaeModel(Native.vvae_model_desc desc)
        {
            PixelChannels = desc.pixel_channels;
            LatentChannels = desc.latent_channels;
            SpatialScale = desc.spatial_scale;
            TimeScale = desc.time_scale;
            DecodedChannels = desc.decoded_channels;
            Family = Utf8.Text(desc.family, 20);
            LatentFormats = Utf8.Text(desc.latent_formats, 64).Split(new[] { ',' }, StringSplitOptions.RemoveEmptyEntries);
            Latents = desc.latents_known == 1 ? new VaeLatents(desc) : null;
        }

        public long PixelChannels { get; }
        public long LatentChannels { get; }
        public long SpatialScale { get; }
        public long TimeScale { get; }
        /// <summary>Of video that is decoded.</summary>
        public long DecodedChannels { get; }
        public string Family { get; }
        /// <summary>The published models whose latents these may be. If there are several, latent_format says which.</summary>
        public IReadOnlyList<string> LatentFormats { get; }
        /// <summary>Null if they are not known.</summary>
        public VaeLatents Latents { get; }

        public Shape LatentOf(Shape video)
        {
            return new Shape(video.Batch, LatentChannels, 1 + (video.Frames - 1 + TimeScale - 1) / TimeScale,
                             (video.Height + SpatialScale - 1) / SpatialScale, (video.Width + SpatialScale - 1) / SpatialScale);
        }

        public Shape VideoOf(Shape latent)
        {
            return new Shape(latent.Batch, DecodedChannels, 1 + (latent.Frames - 1) * TimeScale,
                             latent.Height * SpatialScale, latent.Width * SpatialScale);
        }
    }

    /// <summary>Bytes that a <see cref="Vae"/> and its streams hold.</summary>
    public struct VaeMemory
    {
        public int Streams { get; internal set; }
        public ulong Now { get; internal set; }
        public ulong Peak { get; internal set; }
        /// <summary>The part of Now that <see cref="Vae.Trim"/> would give back.</summary>
        public ulong Reserved { get; internal set; }
        public ulong Host { get; internal set; }
    }

    /// <summary>What one device of a <see cref="Vae"/> holds, and its part of the last plan or run.</summary>
    public struct VaeDeviceShare
    {
        public string Id { get; internal set; }
        /// <summary>False if it failed or has no room.</summary>
        public bool IsUsed { get; internal set; }
        public ulong Now { get; internal set; }
        public ulong Peak { get; internal set; }
        public ulong Reserved { get; internal set; }
        public ulong Host { get; internal set; }
        public ulong DeviceBytes { get; internal set; }
        public ulong HostBytes { get; internal set; }
        /// <summary>The first output frame that it computes, and the clip of the batch that this frame is of.</summary>
        public long FirstClip { get; internal set; }
        public long FirstFrame { get; internal set; }
        /// <summary>Output frames of all clips together.</summary>
        public long Frames { get; internal set; }
        public double Seconds { get; internal set; }
        /// <summary>0 after a plan.</summary>
        public double MeasuredSeconds { get; internal set; }
    }

    public enum VaeLogLevel
    {
        Debug = Native.VVAE_LOG_DEBUG,
        Info = Native.VVAE_LOG_INFO,
        Warning = Native.VVAE_LOG_WARNING,
        Error = Native.VVAE_LOG_ERROR,
    }

    /// <summary>
    /// A model on a device, with its settings. For one thread at a time; a second one gets a <see cref="VaeStateException"/>.
    /// <see cref="Memory"/>, <see cref="LastRun"/>, cancellation and Dispose work from any thread: memory is given back when the last call and
    /// stream are done.
    /// </summary>
    public sealed unsafe partial class Vae : IDisposable
    {
        private static readonly Native.vvae_log_fn Logger = WriteLog;

        private readonly VaeHandle handle;

        /// <param name="checkpoint">Path of a safetensors file.</param>
        /// <param name="device">"cpu", "cuda:0", ... as <see cref="VaeLibrary.Devices"/> lists them, or "auto".</param>
        /// <param name="log">Called on threads that call the library.</param>
        public Vae(string checkpoint, string device = "auto", Action<VaeLogLevel, string> log = null)
        {
            if (checkpoint == null) throw new ArgumentNullException(nameof(checkpoint));
            var info = new Native.vvae_create_info { struct_size = (uint)sizeof(Native.vvae_create_info) };
            info.abi_version = Native.VVAE_ABI_VERSION;
            GCHandle logTarget = default(GCHandle);
            if (log != null)
            {
                logTarget = GCHandle.Alloc(log);
                info.log = Marshal.GetFunctionPointerForDelegate(Logger);
                info.log_user = GCHandle.ToIntPtr(logTarget).ToPointer();
            }
            fixed (byte* weights = Utf8.Bytes(checkpoint), name = Utf8.Bytes(device))
            {
                info.weights = weights;
                info.device = name;
                int status = Native.vvae_create(&info, out handle);
                if (status < 0 && log != null) logTarget.Free();
                Error.Check(status);
            }
            if (log != null) handle.Keep(logTarget);
        }

        public void Dispose()
        {
            handle.Dispose();
        }

        public VaeModel Model
        {
            get
            {
                var desc = new Native.vvae_model_desc { struct_size = (uint)sizeof(Native.vvae_model_desc) };
                // Means and deviations are the handle's, which another thread may dispose of meanwhile.
                bool held = false;
                handle.DangerousAddRef(ref held);
                try
                {
                    Error.Check(Native.vvae_model_info(handle, &desc));
                    return new VaeModel(desc);
                }
                finally
                {
                    if (held) handle.DangerousRelease();
                }
            }
        }

        public VaeMemory Memory
        {
            get
            {
                var info = new Native.vvae_memory_info { struct_size = (uint)sizeof(Native.vvae_memory_info) };
                Error.Check(Native.vvae_memory(handle, &info));
                return new VaeMemory
                {
                    Streams = (int)info.streams, Now = info.now, Peak = info.peak, Reserved = info.reserved, Host = info.host,
                };
            }
        }

        /// <summary>The devices: one, or those of the list that it was opened with.</summary>
        public VaeDeviceShare[] Devices
        {
            get
            {
                var shares = new VaeDeviceShare[Device(0).device_count];
                for (uint index = 0; index < shares.Length; index++)
                {
                    Native.vvae_handle_device_info info = Device(index);
                    shares[index] = new VaeDeviceShare
                    {
                        Id = Utf8.Text(info.id, 20), IsUsed = info.unused == 0, Now = info.now, Peak = info.peak,
                        Reserved = info.reserved, Host = info.host, DeviceBytes = info.device_bytes,
                        HostBytes = info.host_bytes, FirstClip = info.first_clip, FirstFrame = info.first_frame,
                        Frames = info.frames, Seconds = info.seconds, MeasuredSeconds = info.measured_seconds,
                    };
                }
                return shares;
            }
        }

        private Native.vvae_handle_device_info Device(uint index)
        {
            var info = new Native.vvae_handle_device_info { struct_size = (uint)sizeof(Native.vvae_handle_device_info) };
            Error.Check(Native.vvae_handle_device(handle, index, &info));
            return info;
        }

        /// <summary>Sets a parameter. <see cref="VaeLibrary.Nodes"/> says which there are and what they take.</summary>
        public void Configure(string key, string value)
        {
            if (key == null) throw new ArgumentNullException(nameof(key));
            if (value == null) throw new ArgumentNullException(nameof(value));
            fixed (byte* k = Utf8.Bytes(key), v = Utf8.Bytes(value)) Error.Check(Native.vvae_configure(handle, k, v));
        }

        // Numbers are written the same way in every country.
        public void Configure(string key, long value) { Configure(key, value.ToString(CultureInfo.InvariantCulture)); }
        public void Configure(string key, double value) { Configure(key, value.ToString("R", CultureInfo.InvariantCulture)); }
        public void Configure(string key, bool value) { Configure(key, value ? "true" : "false"); }

        /// <summary>Gives back memory that waits for the next run.</summary>
        public void Trim(bool workspace = true, bool weights = true)
        {
            uint what = (workspace ? (uint)Native.VVAE_TRIM_WORKSPACE : 0) | (weights ? (uint)Native.VVAE_TRIM_WEIGHTS : 0);
            Error.Check(Native.vvae_trim(handle, what));
        }

        /// <summary>Stops the run that is under way on another thread, if there is one.</summary>
        public void Cancel()
        {
            Error.Check(Native.vvae_cancel(handle));
        }

        /// <summary>What a job takes. <paramref name="node"/> is "encode" or "decode", the shape that of what goes in.</summary>
        public VaePlan Plan(string node, Shape shape)
        {
            var info = new Native.vvae_plan_info { struct_size = (uint)sizeof(Native.vvae_plan_info) };
            fixed (byte* name = Utf8.Bytes(node))
            {
                Error.Check(Native.vvae_plan(handle, name, (long*)&shape, &info, null, 0));
                var text = new byte[info.text_length + 1];
                fixed (byte* words = text)
                {
                    Error.Check(Native.vvae_plan(handle, name, (long*)&shape, &info, words, (ulong)text.Length));
                    return new VaePlan(&info, Utf8.Text(words, text.Length));
                }
            }
        }

        /// <summary>The same for a range of the output. The shape is that of the whole clip.</summary>
        public VaePlan PlanRange(string node, Shape shape, FrameRange frames)
        {
            var info = new Native.vvae_plan_info { struct_size = (uint)sizeof(Native.vvae_plan_info) };
            fixed (byte* name = Utf8.Bytes(node))
            {
                Error.Check(Native.vvae_plan_range(handle, name, (long*)&shape, frames.First, frames.Count, &info, null, 0));
                var text = new byte[info.text_length + 1];
                fixed (byte* words = text)
                {
                    Error.Check(Native.vvae_plan_range(handle, name, (long*)&shape, frames.First, frames.Count, &info, words,
                                                       (ulong)text.Length));
                    return new VaePlan(&info, Utf8.Text(words, text.Length));
                }
            }
        }

        /// <summary>The plan as JSON: its steps, and what lies where in memory. The header says what is in it.</summary>
        public string PlanTimeline(string node, Shape shape)
        {
            fixed (byte* name = Utf8.Bytes(node))
            {
                ulong length = 0;
                Error.Check(Native.vvae_plan_timeline(handle, name, (long*)&shape, null, 0, &length));
                while (true)
                {
                    var text = new byte[length + 1];
                    fixed (byte* json = text)
                    {
                        Error.Check(Native.vvae_plan_timeline(handle, name, (long*)&shape, json, (ulong)text.Length, &length));
                        // Free memory may have changed in between, and the plan with it.
                        if (length < (ulong)text.Length)
                            return Utf8.Text(json, text.Length);
                    }
                }
            }
        }

        /// <summary>About the last encode, decode, or pull that wrote frames. From any thread.</summary>
        public VaeRunReport LastRun
        {
            get
            {
                var info = new Native.vvae_run_report { struct_size = (uint)sizeof(Native.vvae_run_report) };
                Error.Check(Native.vvae_last_run(handle, &info, null, 0));
                var text = new byte[info.text_length + 1];
                fixed (byte* words = text)
                {
                    Error.Check(Native.vvae_last_run(handle, &info, words, (ulong)text.Length));
                    return new VaeRunReport(&info, Utf8.Text(words, text.Length));
                }
            }
        }

        /// <summary>Opens a stream: a clip of any length in pieces. The shape is that of what goes in; its length is ignored.</summary>
        public VaeStream OpenStream(string node, Shape shape)
        {
            return OpenStream(node, shape, 0);
        }

        /// <summary>
        /// The same in the middle of a clip: the output begins with frame <paramref name="first"/>, the input where
        /// <see cref="RangeInputs"/> says for a count of 0. So a clip is resumed, with the same bits: first is the number
        /// of frames that were pulled.
        /// </summary>
        public VaeStream OpenStream(string node, Shape shape, long first)
        {
            StreamHandle stream;
            fixed (byte* name = Utf8.Bytes(node))
            {
                Error.Check(Native.vvae_stream_open_at(handle, name, (long*)&shape, first, out stream));
            }
            stream.HoldOn(handle);
            return new VaeStream(stream, handle);
        }

        [MonoPInvokeCallback(typeof(Native.vvae_log_fn))]
        private static void WriteLog(void* user, int level, byte* message)
        {
            try
            {
                var log = (Action<VaeLogLevel, string>)GCHandle.FromIntPtr((IntPtr)user).Target;
                log((VaeLogLevel)level, Utf8.Text(message));
            }
            catch (Exception)
            {
                // A log that fails has nobody to tell, and nothing may be thrown through native code.
            }
        }
    }
}
