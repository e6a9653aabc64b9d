using System;
using System.Runtime.InteropServices;

namespace VideoVae
{
    /// <summary>From managed memory to tensors: which element type it is, and whether it holds all that a layout reaches.</summary>
    internal static unsafe class Elements
    {
        /// <summary>Describes pinned memory of <paramref name="length"/> elements of T.</summary>
        public static Tensor Pinned<T>(byte* data, int length, TensorLayout layout, string name) where T : struct
        {
            ElementType element = layout.Element ?? Of<T>();
            if (Bytes(element) != Size<T>()) throw new ArgumentException($"{typeof(T).Name} does not hold {element}", name);
            long reach = layout.Reach();
            if (length < reach)
            {
                throw new ArgumentException($"{name} holds {length} elements, its layout {layout.Shape} reaches {reach}", name);
            }
            return new Tensor((IntPtr)data, element, layout);
        }

        private static ElementType Of<T>() where T : struct
        {
            if (typeof(T) == typeof(byte)) return ElementType.UInt8;
            if (typeof(T) == typeof(ushort)) return ElementType.UInt16;
            if (typeof(T) == typeof(float)) return ElementType.Float32;
#if NET5_0_OR_GREATER
            if (typeof(T) == typeof(Half)) return ElementType.Float16;
#endif
            throw new ArgumentException($"no element type follows from {typeof(T).Name}; name it: layout.Of(ElementType...)");
        }

        private static int Bytes(ElementType element)
        {
            return ((int)element >> 8 & 0xff) / 8;
        }

        private static int Size<T>() where T : struct
        {
            return MemoryMarshal.AsBytes(new ReadOnlySpan<T>(new T[1])).Length;
        }
    }
}
