using System;

namespace VideoVae
{
    /// <summary>Integers are pixels over the full range of the type; latents are floats.</summary>
    public enum ElementType
    {
        UInt8 = Native.VVAE_DTYPE_U8,
        UInt16 = Native.VVAE_DTYPE_U16,
        Float16 = Native.VVAE_DTYPE_F16,
        BFloat16 = Native.VVAE_DTYPE_BF16,
        Float32 = Native.VVAE_DTYPE_F32,
    }

    public enum DeviceType
    {
        Cpu = Native.VVAE_DEVICE_CPU,
        Cuda = Native.VVAE_DEVICE_CUDA,
        CudaHost = Native.VVAE_DEVICE_CUDA_HOST,
        Vulkan = Native.VVAE_DEVICE_VULKAN,
    }

    /// <summary>How a tensor lies in memory. A <see cref="Shape"/> alone stands for a compact one.</summary>
    public struct TensorLayout
    {
        public readonly Shape Shape;

        /// <summary>In elements; none: compact, columns innermost.</summary>
        public readonly Shape? Strides;

        /// <summary>None: as the type of the array says. To be named for 16-bit floats, which .NET has no type for before 5.</summary>
        public readonly ElementType? Element;

        public TensorLayout(Shape shape, Shape? strides = null, ElementType? element = null)
        {
            Shape = shape;
            Strides = strides;
            Element = element;
        }

        /// <summary>Frames of pixels with their channels side by side: [T, H, W, C] in memory.</summary>
        public static TensorLayout Interleaved(long frames, long height, long width, long channels = 3)
        {
            long row = width * channels, frame = height * row;
            return new TensorLayout(new Shape(1, channels, frames, height, width),
                                    new Shape(frames * frame, 1, frame, row, channels));
        }

        public TensorLayout Of(ElementType element)
        {
            return new TensorLayout(Shape, Strides, element);
        }

        public static implicit operator TensorLayout(Shape shape)
        {
            return new TensorLayout(shape);
        }

        /// <summary>How many elements from the first one on belong to it. Throws if some lie before the first.</summary>
        internal long Reach()
        {
            if (Shape.Elements <= 0) return 0;
            if (Strides == null) return Shape.Elements;
            Shape s = Strides.Value;
            checked
            {
                long last = 0;
                foreach (long step in new[] { (Shape.Batch - 1) * s.Batch, (Shape.Channels - 1) * s.Channels,
                                              (Shape.Frames - 1) * s.Frames, (Shape.Height - 1) * s.Height,
                                              (Shape.Width - 1) * s.Width })
                {
                    if (step < 0) throw new ArgumentException("negative strides need a Tensor, which names its first element");
                    last += step;
                }
                return last + 1;
            }
        }
    }

    /// <summary>Memory that stays where it is, described: native memory, a pinned array, or memory of a GPU.</summary>
    public struct Tensor
    {
        public readonly IntPtr Data;
        public readonly ElementType Element;
        public readonly TensorLayout Layout;
        public readonly DeviceType Device;
        public readonly int DeviceId;

        public Tensor(IntPtr data, ElementType element, TensorLayout layout, DeviceType device = DeviceType.Cpu,
                      int deviceId = 0)
        {
            Data = data;
            Element = element;
            Layout = layout;
            Device = device;
            DeviceId = deviceId;
        }
    }

    /// <summary>A tensor as C has it. It points into itself, so it has to be a local variable, which does not move.</summary>
    internal unsafe struct NativeTensor
    {
        public Native.vvae_tensor Raw;
        private Shape shape, strides;

        public static void Describe(Tensor tensor, NativeTensor* to)
        {
            *to = new NativeTensor { shape = tensor.Layout.Shape, strides = tensor.Layout.Strides.GetValueOrDefault() };
            to->Raw.data = tensor.Data.ToPointer();
            to->Raw.device_type = (int)tensor.Device;
            to->Raw.device_id = tensor.DeviceId;
            to->Raw.ndim = 5;
            to->Raw.dtype = (uint)tensor.Element;
            to->Raw.shape = (long*)&to->shape;
            to->Raw.strides = tensor.Layout.Strides == null ? null : (long*)&to->strides;
        }
    }
}
