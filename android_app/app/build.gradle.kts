plugins {
    id("com.android.application")
    id("org.jetbrains.kotlin.android")
}

val executorch: String by project
val qnn: String by project

android {
    namespace = "org.ondevice.app"
    compileSdk = 35

    defaultConfig {
        applicationId = "org.ondevice.app"
        minSdk = 26
        targetSdk = 35
        versionCode = 1
        versionName = "0.1.0"
        ndk { abiFilters += listOf("arm64-v8a", "x86_64") }
    }

    flavorDimensions += "runtime"
    productFlavors {
        create("cpu") { dimension = "runtime" }
        create("qnn") {
            dimension = "runtime"
            // Qualcomm builds its runtime for phones alone.
            ndk { abiFilters.clear(); abiFilters += "arm64-v8a" }
        }
    }

    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_1_8
        targetCompatibility = JavaVersion.VERSION_1_8
    }
    kotlinOptions { jvmTarget = "1.8" }

    // The tests of the screens run with Maven, which needs nothing of androidx: `make android-test`.
    sourceSets["test"].kotlin.setSrcDirs(emptyList<String>())
}

// Libraries are mapped from the APK; the DSP loads QNN's from files, so that flavour unpacks them.
androidComponents {
    onVariants(selector().withFlavor("runtime" to "qnn")) { it.packaging.jniLibs.useLegacyPackaging.set(true) }
}

dependencies {
    implementation(project(":core"))
    "cpuImplementation"("org.pytorch:executorch-android:$executorch")
    // qnn-runtime is under Qualcomm's own licence, which its POM names: object code inside your own app only.
    "qnnImplementation"("org.pytorch:executorch-android-qnn:$executorch")
    "qnnImplementation"("com.qualcomm.qti:qnn-runtime:$qnn")
}
