using System;
using System.Runtime.InteropServices;

namespace VideoVae
{
    /// <summary>Consecutive frames of a clip.</summary>
    public struct FrameRange
    {
        public readonly long First, Count;

        public FrameRange(long first, long count)
        {
            First = first;
            Count = count;
        }
    }

    /// <summary>Clips, channels, frames, rows, columns; or the steps in memory from one to the next, in elements.</summary>
    [StructLayout(LayoutKind.Sequential)]
    public struct Shape : IEquatable<Shape>
    {
        // Five numbers side by side, as C has them.
        public readonly long Batch, Channels, Frames, Height, Width;

        public Shape(long batch, long channels, long frames, long height, long width)
        {
            Batch = batch;
            Channels = channels;
            Frames = frames;
            Height = height;
            Width = width;
        }

        internal unsafe Shape(long* five) : this(five[0], five[1], five[2], five[3], five[4]) { }

        public long Elements { get { return checked(Batch * Channels * Frames * Height * Width); } }

        public Shape WithFrames(long frames)
        {
            return new Shape(Batch, Channels, frames, Height, Width);
        }

        public bool Equals(Shape other)
        {
            return Batch == other.Batch && Channels == other.Channels && Frames == other.Frames &&
                   Height == other.Height && Width == other.Width;
        }

        public override bool Equals(object other)
        {
            return other is Shape && Equals((Shape)other);
        }

        public override int GetHashCode()
        {
            return ((((Batch * 31 + Channels) * 31 + Frames) * 31 + Height) * 31 + Width).GetHashCode();
        }

        public override string ToString()
        {
            return $"[{Batch}, {Channels}, {Frames}, {Height}, {Width}]";
        }
    }
}
